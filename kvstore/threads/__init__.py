"""The only threads of the store, and how work is handed to them."""
