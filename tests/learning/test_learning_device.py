"""Training on another device than the CPU: updates mix no tensors of the two, and give the same weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparring.pipeline.learning.checkpoints import Checkpoint
from sparring.pipeline.learning.learner import Learner
from sparring.pipeline.learning.settings import BehavioralCloningSettings, PPOHyperparameters, TrainerSettings
from sparring.pipeline.messages.segments import Segments
from sparring.pipeline.messages.state import PolicyWeights
from sparring.pipeline.networks import device as border
from sparring.pipeline.networks.actor import Actor
from sparring.pipeline.networks.device import CPU, back, configure_torch, over, usable
from sparring.pipeline.networks.settings import MemorySettings, NetworkSettings, Unsupported
from sparring.pipeline.specs import BehaviorSpec
from sparring.pipeline.stepping.policies import NetworkPolicy
from tests.learning.group_helpers import LENGTH, poca_settings, record
from tests.learning.learning_helpers import algorithm_of
from tests.learning.other_device import OTHER_DEVICE, READS, other_device
from tests.learning.random_groups import OWN, PLAIN, RICH, World, specs_of
from tests.learning.signals_helpers import NAMES, SPECS, played, record_of, recorded, signals_of, trainer, write

PPOS: dict[str, dict[str, Any]] = {
    "rich": {"spec": RICH},
    "memory": {"memory": True, "previous": True, "normalize": True, "clip_value_loss": True},
    "rich_shared_memory": {"spec": RICH, "memory": True, "shared_critic": True},
    "signals": {"spec": SPECS["bytes"], "names": NAMES, "cloned": True, "use_actions": True, "use_vail": True},
    "bc": {"kind": "bc", "cloned": True, "memory": True},
}
POCAS: dict[str, tuple[BehaviorSpec, int, dict[str, Any]]] = {
    "teammates": (PLAIN, 2, {"clip_value_loss": True}),
    "rich_memory": (RICH, 1, {"memory": True, "previous": True}),
}


def settings_of(
    path: Path,
    spec: BehaviorSpec,
    names=("extrinsic",),
    cloned=False,
    use_actions=False,
    use_vail=False,
    **how: Any,
) -> TrainerSettings:
    demo = write(path, spec, recorded(spec, [4, 6, 5, 3, 7]))
    cloning = BehavioralCloningSettings(demo_path=str(demo)) if cloned else None
    signals = signals_of(names, demo, use_actions=use_actions, use_vail=use_vail, normalize=True)
    return trainer(signals, cloning=cloning, **{"num_epoch": 1} | how)


def played_records(settings: TrainerSettings, spec: BehaviorSpec) -> list[Segments]:
    """Returns segments that a policy of these settings plays."""
    hyper = PPOHyperparameters.model_validate(settings.hyperparameters.model_dump())
    plain = {"trainer_type": "ppo", "hyperparameters": hyper, "behavioral_cloning": None}
    plain["reward_signals"] = signals_of(["extrinsic"])
    one = algorithm_of("Test", spec, settings.model_copy(update=plain), torch.Generator().manual_seed(5))
    carried: dict[int, Any] = {}
    return [record_of(played(one, seed=seed, carried_by_agent=carried)) for seed in range(2)]


def update(learner: Learner, record: Segments) -> dict[str, float]:
    learner.add(record)
    report = learner.update(everything=True)
    assert report.minibatches > 1
    assert not report.skipped
    return report.statistics


def assert_same(one: Learner, other: Learner) -> None:
    """Checks that saved and published values are equal."""
    mine, yours = one.checkpoint(), other.checkpoint()
    pairs = [(mine.weights, yours.weights), (mine.optimizer, yours.optimizer)]
    for first, second in [*pairs, (one.weights().arrays, other.weights().arrays)]:
        assert first.keys() == second.keys()
        for name, array in first.items():
            own, its = queries_and_values(name, array), queries_and_values(name, second[name])
            np.testing.assert_allclose(its, own, rtol=1e-4, atol=2e-5, err_msg=name)


def queries_and_values(name: str, array: np.ndarray) -> np.ndarray:
    """Returns an array without the biases of attention keys, which no softmax depends on and Adam moves by rounding."""
    return array.reshape(3, -1)[[0, 2]] if name.endswith("attention.project.bias") else array


# ---------------------------------------------------------------- updates


@pytest.mark.parametrize("case", PPOS.values(), ids=PPOS)
def test_update_on_another_device_mixes_no_tensors_and_equals_that_on_the_cpu(
    case: dict[str, Any], tmp_path: Path
) -> None:
    spec = case.get("spec", SPECS["hybrid"])
    settings = settings_of(tmp_path, **{"spec": spec} | case)
    records, here = played_records(settings, spec), Learner("Test", spec, settings, 3)
    statistics = [update(here, one) for one in records]
    with other_device() as device:
        there = Learner("Test", spec, settings, 3, device=device)
        assert [update(there, one) for one in records] == [pytest.approx(one, rel=1e-4, abs=1e-6) for one in statistics]
        algorithm = there._algorithm
        for network in (algorithm.networks.modules, algorithm.signals.modules):
            assert {parameter.device for parameter in network.parameters()} <= {OTHER_DEVICE}
        assert algorithm.networks.actor.device == OTHER_DEVICE
        assert_same(here, there)


@pytest.mark.parametrize("case", POCAS.values(), ids=POCAS)
def test_group_update_on_another_device_equals_that_on_the_cpu_with_new_teammates(
    case: tuple[BehaviorSpec, int, dict[str, Any]],
) -> None:
    spec, teammates, how = case
    settings, specs = poca_settings(num_epoch=1, batch_size=10, **how), specs_of(spec, teammates)
    small = settings.network_settings.model_copy(update={"vis_encode_type": "fully_connected"})
    settings = settings.model_copy(update={"network_settings": small})
    world = World(specs, Actor(spec, settings.network_settings, torch.Generator().manual_seed(5)))
    length = LENGTH if "memory" in how else 0
    records = [record(world.groups(4, horizon=5), specs, length=length) for _ in range(2)]
    teammates = {name: one for name, one in specs.items() if name != OWN}
    here = Learner(OWN, spec, settings, 3)
    here.register(teammates)
    statistics = [update(here, one) for one in records]
    with other_device() as device:
        there = Learner(OWN, spec, settings, 3, device=device)
        there.register(teammates)
        assert [update(there, one) for one in records] == [pytest.approx(one, rel=1e-4, abs=1e-6) for one in statistics]
        assert {parameter.device for parameter in there._algorithm.networks.modules.parameters()} == {OTHER_DEVICE}
        assert_same(here, there)


@pytest.mark.parametrize("case", [*PPOS.values(), *POCAS.values()], ids=[*PPOS, *POCAS])
def test_update_reads_from_the_device_equally_often_however_many_minibatches_it_has(case: Any, tmp_path: Path) -> None:
    """On a GPU each of them would wait for the one before it."""
    found = []
    for epochs in (1, 3):
        if isinstance(case, dict):
            spec = case.get("spec", SPECS["hybrid"])
            settings = settings_of(tmp_path, **{"spec": spec, "num_epoch": epochs} | case)
            records, specs = played_records(settings, spec), {}
        else:
            spec, teammates, how = case
            settings, specs = poca_settings(num_epoch=epochs, batch_size=10, **how), specs_of(spec, teammates)
            world = World(specs, Actor(spec, settings.network_settings, torch.Generator().manual_seed(5)))
            records = [record(world.groups(4, horizon=5), specs, length=LENGTH if "memory" in how else 0)]
        with other_device() as device:
            there = Learner(OWN if specs else "Test", spec, settings, 3, device=device)
            there.register({name: one for name, one in specs.items() if name != OWN})
            there.add(records[0])
            before = Counter(READS)
            report = there.update(everything=True)
            found.append((report.minibatches, READS - before))
    (few, reads), (many, more) = found
    assert many == 3 * few
    assert more == reads


@pytest.mark.parametrize("starts_there", [True, False], ids=["there", "here"])
def test_run_resumes_on_another_device(starts_there: bool, tmp_path: Path) -> None:
    """Checkpoints do not depend on a device."""
    spec = SPECS["hybrid"]
    settings = settings_of(tmp_path, spec, NAMES, cloned=True, use_vail=True)
    first, _ = played_records(settings, spec)
    with other_device() as device:
        begins, terminal_bootstrap_fraction = (CPU, device) if starts_there else (device, CPU)
        through, resumed = (
            Learner("Test", spec, settings, 3, device=one) for one in (begins, terminal_bootstrap_fraction)
        )
        update(through, first)
        checkpoint = through.checkpoint()
        assert isinstance(checkpoint, Checkpoint)
        assert all(type(array) is np.ndarray for array in (checkpoint.weights | checkpoint.optimizer).values())
        resumed.restore(checkpoint)
        for name, array in resumed.checkpoint().optimizer.items():
            np.testing.assert_array_equal(array, checkpoint.optimizer[name])
        assert resumed.weights_sha256 == through.weights_sha256


@pytest.mark.parametrize("spec", [PLAIN, RICH], ids=["vectors", "rich"])
@pytest.mark.parametrize("memory", [None, MemorySettings(memory_size=8, sequence_length=4)], ids=["", "memory"])
def test_acting_on_another_device_equals_that_on_the_cpu(spec: BehaviorSpec, memory: MemorySettings | None) -> None:
    network = NetworkSettings(
        hidden_units=8,
        normalize=True,
        vis_encode_type="fully_connected",
        memory=memory,
        previous_action=memory is not None,
    )
    source = np.random.default_rng(3)
    seen = tuple(source.random((5, *one.shape)).astype(np.float32) for one in spec.observations)
    arrays = Actor(spec, network, torch.Generator().manual_seed(5)).arrays()

    def acted(device: torch.device) -> list[np.ndarray]:
        policy = NetworkPolicy(spec, network, np.random.default_rng(7), device)
        policy.load(PolicyWeights(behavior="Test", version=1, arrays=arrays))
        assert {one.device for one in policy._actor.parameters()} == {device}
        carried = np.zeros((5, policy.carried), np.float32)
        chosen = [policy.act(seen, None, carried if policy.carried else None) for _ in range(2)]
        return [carried, *(column for one in chosen for column in (one.continuous, one.discrete, one.log_probs))]

    here = acted(CPU)
    with other_device() as device:
        for mine, theirs in zip(here, acted(device), strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- transfers


@pytest.mark.parametrize("left", ["advantage", "inputs"])
def test_simulated_device_detects_a_missing_transfer(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated device detects a missing transfer."""

    def over_except_one(rows: Any, device: torch.device) -> Any:
        here = back(rows.advantage) if left == "advantage" else tuple(map(back, rows.inputs))
        kept = torch.from_numpy(here) if left == "advantage" else tuple(map(torch.from_numpy, here))
        return over(rows, device)._replace(**{left: kept})

    settings = settings_of(tmp_path, SPECS["hybrid"])
    with other_device() as device:
        learner = Learner("Test", SPECS["hybrid"], settings, 3, device=device)
        learner.add(played_records(settings, SPECS["hybrid"])[0])
        monkeypatch.setattr("sparring.pipeline.learning.ppo.over", over_except_one)
        with pytest.raises(RuntimeError, match="is on the CPU, others are on another device"):
            learner.update(everything=True)


def test_tensors_of_the_device_are_read_through_the_transfer_only() -> None:
    with other_device() as device:
        there = over((torch.arange(3), None, (torch.ones(2),)), device)
        assert there[0].device == there[2][0].device == OTHER_DEVICE
        with pytest.raises(RuntimeError):
            there[0].numpy()
        np.testing.assert_array_equal(back(there[0]), [0, 1, 2])


def test_on_the_cpu_no_tensor_is_moved_or_copied() -> None:
    record = (torch.arange(3), None)
    assert over(record, CPU) is record
    assert np.shares_memory(back(record[0]), record[0].numpy())


# ---------------------------------------------------------------- availability


def test_unavailable_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch raises these errors if it was built without CUDA or finds no GPU."""
    assert usable(None) == usable("cpu") == CPU
    for failure in (AssertionError("Torch not compiled with CUDA enabled"), RuntimeError("no card\nand advice")):

        def ones(*_: Any, failure: Exception = failure, **__: Any) -> None:
            raise failure

        monkeypatch.setattr(border.torch, "ones", ones)
        with pytest.raises(Unsupported) as refused:
            usable("cuda:1")
        assert "torch_settings.device 'cuda:1'" in refused.value.got
        assert refused.value.got.endswith(str(failure).splitlines()[0])
        assert refused.value.expected.startswith("cpu")
        assert "leave torch_settings.device out" in refused.value.remedy


def test_threads_and_precision_of_products_reach_pytorch() -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        configure_torch(2, "medium")
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (2, "medium")
    finally:
        configure_torch(threads, precision)
