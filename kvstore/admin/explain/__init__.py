"""The verb that tells why blocks were not found: explain."""
