"""The index in Redis or Valkey; its scripts lie in lua/."""
