"""The verbs: each parses, calls a function of kvstore.admin, prints, and exits by what is in its report.

A module per group, named as in kvstore.admin and kvstore.cli.text. In each section of the reference its verbs
come in the order in which they stand in it. At the end of a module: what code a report ends with, if not 0.
"""
