"""The registry holds all guarantees by name, in the order of the report."""

from tests.guarantees import (
    compilation,
    decoding,
    determinism,
    endurance,
    equality,
    errors,
    gradients,
    interference,
    memory,
)

GUARANTEES = {
    guarantee.name: guarantee
    for guarantee in (
        *equality.GUARANTEES,
        errors.GUARANTEE,
        interference.GUARANTEE,
        gradients.GUARANTEE,
        compilation.GUARANTEE,
        determinism.GUARANTEE,
        decoding.GUARANTEE,
        memory.GUARANTEE,
        endurance.GUARANTEE,
    )
}
