"""Composition roots of the kvtier services: read configuration, build, serve, drain."""
