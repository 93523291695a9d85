"""autofit: find, by measurement, the fastest LLM training configuration that fits a GPU."""

__version__ = "0.1.0"
