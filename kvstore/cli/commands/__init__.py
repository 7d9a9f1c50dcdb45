"""The commands: each parses, calls one function of kvstore.admin, prints, and exits by the table.

inventory   status, ls, show, namespaces
transfer    export, import, warm
measure     bench
service     doctor, vllm-config

`add_to` of each module registers its commands, in the order in which the reference lists them.
"""
