"""A whole cluster on one machine: `kvtier up`, `down`, `status`, `config`, `demo`.

Starts the services as processes of their own and never imports what they do, only their settings.
What must not live here: anything that a service needs to run.
"""
