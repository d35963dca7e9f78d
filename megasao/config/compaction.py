"""Long episodes in segments."""

from pydantic import Field

from megasao.config.base import Section

REQUEST = (
    "There is no more room for this conversation. Write a summary of it: what was asked, what you did and found, and "
    "what is left to do. You will go on with the task and this summary alone."
)
RESUME = "\n\nYou have worked on this before. Your summary:\n{summary}\n\nWhat you were shown last:\n{observation}"


class CompactionConfig(Section):
    """When the window is full the model writes a summary, and goes on in a new segment with task and summary."""

    max_segments: int = Field(4, ge=2, description="Most segments of an episode; the last one ends where it is full.")
    summary_tokens: int = Field(1024, ge=1, description="Most tokens of a summary.")
    request: str = Field(REQUEST, min_length=1, description="What asks for the summary.")
    resume: str = Field(
        RESUME, description="What a new segment adds to the task, with {summary} and {observation} in it."
    )
