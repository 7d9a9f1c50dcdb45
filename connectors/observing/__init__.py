"""What requests ask for, recorded by connectors that store and load nothing (`kv.observe`, `ec.observe`)."""
