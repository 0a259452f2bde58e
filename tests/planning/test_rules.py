"""The table of rules: what each forbids and where, what the planner says of it, and that a lock is never overruled."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from gplan.core import Phase
from gplan.errors import GplanError, UnsupportedError
from gplan.planning.options import PlanOptions
from gplan.planning.resolve import resolve
from gplan.planning.rules import (
    CANDIDATES,
    RULES,
    Facts,
    broken_kernels_rule,
    broken_rule,
    broken_variant_rule,
    candidates,
    rejections,
)
from tests.checkpoints import make_checkpoint

GPU = Facts(device="cuda", kernels="flashinfer", dtype="torch.bfloat16", head_dim=128)

# rule, facts under which it applies, what it strikes
CASES = [
    ("flashinfer-needs-a-gpu", Facts(device="cpu", kernels="flashinfer", dtype="torch.bfloat16", head_dim=128)),
    ("flashinfer-in-half-precision", Facts(device="cuda", kernels="flashinfer", dtype="torch.float32", head_dim=128)),
    ("flashinfer-head-dims", Facts(device="cuda", kernels="flashinfer", dtype="torch.bfloat16", head_dim=96)),
    ("reference-reads-lengths-on-the-host", Facts(device="cuda", kernels="reference", dtype="torch.bfloat16")),
    ("no-compiler", replace(GPU, has_compiler=False)),
    ("metadata-decided-on-the-host", GPU),
]


@pytest.mark.parametrize(("name", "facts"), CASES)
def test_each_rule_strikes_what_it_names(name: str, facts: Facts) -> None:
    (rule,) = (rule for rule in RULES if rule.name == name)
    assert rule.applies(facts)
    for kernels in rule.kernels:
        assert broken_kernels_rule(kernels, facts) is rule
    for phase in rule.phases:
        for variant in rule.variants:
            assert broken_variant_rule(phase, variant, facts) is rule
        for backend in rule.backends:
            assert broken_rule(phase, backend, facts) is rule
            assert backend not in candidates(phase, None, facts)
            assert str(rule) in {entry.reason for entry in rejections(phase, facts) if entry.backend == backend}
            with pytest.raises(UnsupportedError, match=f"--{phase}-backend {backend}: .*rule {name}") as raised:
                candidates(phase, backend, facts)
            assert f"Leave out --{phase}-backend" in raised.value.hint


def test_the_cases_reach_every_rule_once() -> None:
    assert Counter(name for name, _ in CASES) == Counter(rule.name for rule in RULES)
    struck = [rule.kernels or (rule.phases and (rule.backends or rule.variants)) for rule in RULES]
    assert all(struck)
    assert all(rule.reason for rule in RULES)


def test_where_no_rule_applies_everything_is_a_candidate() -> None:
    assert broken_kernels_rule("flashinfer", GPU) is None
    for phase in Phase:
        assert candidates(phase, None, GPU) == CANDIDATES[phase]
        assert candidates(phase, "full", GPU) == ("full",)
    assert candidates(Phase.PREFILL, None, GPU, tries_compiler=True) == ("breakable", "piecewise")
    assert broken_variant_rule(Phase.DECODE, "greedy", GPU) is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("rules")))


def test_a_choice_that_a_rule_changed_says_so(checkpoint: str) -> None:
    resolved = resolve(PlanOptions(checkpoint=checkpoint, device="cpu", memory="1GiB"))
    (choice,) = (choice for choice in resolved.choices if choice.field == "kernels")
    assert (choice.value, choice.basis) == ("reference", "rule")
    assert choice.reason == "flashinfer needs a GPU (rule flashinfer-needs-a-gpu)"


def test_a_rule_against_a_lock_is_an_error(checkpoint: str) -> None:
    with pytest.raises(GplanError, match="rule flashinfer-needs-a-gpu") as raised:
        resolve(PlanOptions(checkpoint=checkpoint, device="cpu", memory="1GiB", kernels="flashinfer"))
    assert "Leave out --kernels" in raised.value.hint


def test_a_lock_that_no_rule_forbids_is_kept(checkpoint: str) -> None:
    resolved = resolve(PlanOptions(checkpoint=checkpoint, device="cpu", memory="1GiB", kernels="reference"))
    (choice,) = (choice for choice in resolved.choices if choice.field == "kernels")
    assert (choice.value, choice.basis, choice.reason) == ("reference", "locked", "--kernels was given")


def test_every_choice_has_a_basis_and_a_sentence(checkpoint: str) -> None:
    for choice in resolve(PlanOptions(checkpoint=checkpoint, device="cpu", memory="1GiB", max_batch=4)).choices:
        assert choice.basis in ("measured", "rule", "locked", "default")
        assert len(choice.reason.split()) >= 2
