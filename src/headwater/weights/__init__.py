"""Moving weights from a trainer to rollout workers: the plan, the process group, the fingerprints. Imports torch."""
