"""The base of all configuration classes."""

from pydantic import BaseModel, ConfigDict


class XTunerConfig(BaseModel):
    """A configuration: strict about names, checked at construction and at every assignment.

    A string literal below a field is its description; the reference page is generated from these.
    Constructing one touches no device, no Ray, no folder and no environment variable.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        validate_default=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
