"""The cost of calls: every collective beside its rivals and beside what the machine could do at best."""
