"""What XLA is asked to compile."""

import contextlib

import jax


@contextlib.contextmanager
def compiles():
    """Names of the programs that XLA compiles meanwhile, helper operations included."""
    names = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
