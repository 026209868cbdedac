"""Entry point of `kvtier worker` and of `kvtier worker drain URL`.

A drain is a hook's call of a worker that runs: it loads neither a model nor torch, for which a
container that is full has no memory left. What must not live here: what either does.
"""


def command(argv: list[str]) -> int:
    """Exit status of the command."""
    if argv[:1] == ["drain"]:
        from kvtier_services.worker.draining import drain_command

        return drain_command(argv[1:])
    from kvtier_services.worker.main import command as serve_command

    return serve_command(argv)
