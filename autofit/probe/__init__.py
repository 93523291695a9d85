"""Short measurements of a device's rates, before anything is believed about its speed."""
