"""Ray clusters: sweeps, trainings and the service. Ray is imported where it is used."""
