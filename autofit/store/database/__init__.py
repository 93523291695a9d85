"""The database under the store: its address, connections, schema and failures."""
