"""The causes for which jobs over several hosts do not start, hang or crawl, each looked for and answered."""
