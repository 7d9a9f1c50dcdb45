"""What `cache-admin` does: functions that return frozen reports. No printing.

A folder per group of verbs, as in the commands (kvstore.cli.commands) and their texts (kvstore.cli.text):

    inspect      status; ls; namespaces, namespaces diff; show; stats; top; du; events; operations
    curate       pin, unpin; quota; sessions; warm; plan chooses the segments that export and warm move,
                 prompts those of a prompt
    remove       evict; invalidate, drop; erase, with what it looks for in looks; removal has the steps that
                 drop and erase share
    repair       fsck: what it looks at in check, entries and listing, what it does about it in repair; gc;
                 rebuild; recommit puts a segment back into the index
    archive      export; import: what it reads in members, the store that it goes into in intake; tar
    explain      explain, with what is asked in lookup and what is remembered in journal
    advise       advise: of a recording, which traces reads, store and replay replay and worth prices; of the
                 index in remembered; page, its HTML
    bench        bench
    doctor       doctor: the checks of the machine, of payloads, of maintenance; first_look, that of
                 engines at their start; vllm-config
    serve        serve: what it sees in monitor, collector, highlights and history; metrics in exporter; HTTP
                 in listener; the page in page/; serve --probe in probe

    backends     where settings come from, and the backends of one settings tree opened for people
    reports      models that the reports of several groups are made of
    counting     segments counted and named for reports
    described    what a namespace is, from its stored JSON
    selection    the index and the namespaces that a repair works on
    patience     how many failures in a row mean that the payload store fails as a whole
    operators    the name of whoever runs a verb
    fast_tier    this node's fast tier
    progress     how a long verb reports how far it is

The first lines of each module say what it changes; a module that names nothing there changes nothing. Verbs
that evict, pin or set a quota only plan until they are told to apply.
"""
