"""What a service tells its operators: log lines, metrics, traces. One module for each.

Import the module, not this package: `logs` needs nothing beyond the standard library, `metrics` is
the only importer of prometheus_client, `tracing` (when an endpoint is configured) of opentelemetry;
`service` opens all of them for a composition root. What must not live here: the metrics of any one
service, and settings read from files.
"""
