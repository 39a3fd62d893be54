"""The command line: one thin file per command, registered in main.py."""
