"""What the sections of a scenario are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Probability = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A table of a scenario file: no key that is not listed, no value of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
