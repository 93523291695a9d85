"""A request becomes a plan: the job, the configs, the limit, and why nothing can fit."""
