"""Ray clusters: sweeps and the service. Ray is imported where it is used."""
