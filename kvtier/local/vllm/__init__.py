"""vLLM with kvtier inside: `kvtier vllm serve`, `flags`, `doctor`, and the servers of `kvtier up`.

    settings.py     what an operator says of one server
    flags.py        the flags of vLLM that connector and bridge need; the only place that knows them
    environment.py  which vLLM a Python has, how it is started
    server.py       one server: its model, command line, environment and bridge, put together
    serving.py      vLLM and its bridge as processes that live and end together
    asking.py       what a running server tells over HTTP and ZMQ
    doctor.py       what is missing there, and the flag that mends it
    commands.py     the command line

What must not live here: anything that runs inside vLLM (`kvtier.engines.vllm`) or that follows its
events (`kvtier_services.bridge`).
"""
