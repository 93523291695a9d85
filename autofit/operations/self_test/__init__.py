"""The self-test of a device: one short trial of everything that autofit can do there."""
