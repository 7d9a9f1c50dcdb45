"""The verb that says whether a cache pays, and which: advise."""
