"""The wire: protobuf messages, RPC tables, conversions. The only importer of generated code.

What must not live here: decisions. A malformed message becomes a CallerError, nothing else.
"""
