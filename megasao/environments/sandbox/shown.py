"""What a model is shown of a command that ran."""

from megasao.environments.sandbox.run import Outcome


def shown(outcome: Outcome, characters: int) -> str:
    """The output as a fenced block: beginning and end of a long one, and what stopped the command."""
    text, half = outcome.output.rstrip("\n"), characters // 2
    if len(text) > characters:
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    if outcome.stopped_by is not None:
        text = f"{text}\nstopped: too much {outcome.stopped_by}".lstrip("\n")
    return f"```output\n{text}\n```"
