"""From a trace to bytes: when storages live, and what the allocator reserves for them."""
