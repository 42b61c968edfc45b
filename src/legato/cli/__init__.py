"""The command line: one module a verb. Nothing here loads torch before a verb needs it."""
