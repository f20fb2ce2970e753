"""Updates that cross a process: whole ones arrive to the bit, all others leave an engine that says why it is silent."""

import asyncio
import multiprocessing
import os
import re
import time

import pytest
import torch
from update_helpers import CPU, deliver, grouped, held, serves, started, write_model

from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.model.hf import iter_hf_tensors
from xtuner.v1.ops.bit_sums import bit_sums
from xtuner.v1.rl.weight_update import (
    DeliveryError,
    Inventory,
    Line,
    WeightUpdateError,
    receive_weights,
    send_weights,
    with_checksums,
)

NAME = "model.layers.1.self_attn.k_proj.weight"
TWIN = "model.layers.1.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "old": write_model(root / "old", seed=0), "new": write_model(root / "new", seed=1),
        "untied": write_model(root / "untied", tied=False, seed=2),
    }  # fmt: skip


@pytest.fixture(scope="module")
def new(folders):
    return dict(iter_hf_tensors(folders["new"]))


@pytest.fixture
def engine(folders):
    return started(folders["old"])


def equal(engine, tensors, dtype=None):
    found = held(engine)
    return all(torch.equal(found[n], t.to(dtype or t.dtype).to(found[n].dtype)) for n, t in tensors.items())


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("sent, kept", [(None, "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_a_whole_update_arrives_to_the_bit(folders, new, checksum, sent, kept):
    engine = started(folders["old"], dtype=getattr(torch, kept))
    dtype = getattr(torch, sent) if sent else None
    buckets = grouped(new, dtype)
    outcome = deliver(engine, with_checksums(buckets) if checksum else buckets, 4, expected=4)
    assert outcome == (None, None) and engine.version == 4
    assert equal(engine, new, dtype)
    assert serves(engine) is None


def test_memory_of_the_buckets_is_given_back(engine, new):
    def mapped():
        with open("/proc/self/maps") as maps:
            return sum("memfd:weights" in line for line in maps)

    files = len(os.listdir("/proc/self/fd"))
    lines = Line.pair(20.0)
    for version in range(1, 4):
        assert deliver(engine, grouped(new), version, lines) == (None, None)
    for line in lines:
        line.close()
    assert len(os.listdir("/proc/self/fd")) <= files + 1 and mapped() == 0


def lost_names(tensors, old):
    for number, bucket in enumerate(with_checksums(grouped(tensors))):
        if number == 1:
            kept = len(bucket.tensors) // 2
            bucket = WeightBucket(dict(list(bucket.tensors.items())[:kept]), None, bucket.checksums[:kept])
        yield bucket


def lost_values(tensors, old):
    yield from with_changes(tensors, {n: torch.zeros_like(t) for n, t in list(tensors.items())[5:9]})


def exchanged(tensors, old):
    yield from with_changes(tensors, {NAME: tensors[TWIN], TWIN: tensors[NAME]})


def sent_twice(tensors, old):
    yield from grouped(tensors)
    yield WeightBucket({NAME: tensors[NAME]})


def stale(tensors, old):
    yield from with_changes(tensors, old)


def stale_head(tensors, old):
    yield from with_changes(tensors, {"model.embed_tokens.weight": old["model.embed_tokens.weight"]})


def rounded(tensors, old):
    yield from with_changes(tensors, {n: t.to(torch.bfloat16).float() for n, t in tensors.items()})


def unknown(tensors, old):
    yield from grouped(tensors)
    yield WeightBucket({"lm_head.weight": tensors["model.embed_tokens.weight"]})


def reshaped(tensors, old):
    yield from grouped(tensors | {NAME: tensors[NAME].t()})


def with_changes(tensors, changes):
    """Checksums of the one, values of the other."""
    for bucket in with_checksums(grouped(tensors)):
        bucket.tensors.update({n: t for n, t in changes.items() if n in bucket.tensors})
        yield bucket


FAULTS = {
    lost_names: "missing", lost_values: "checksums", exchanged: f"checksums .*{NAME}, {TWIN}",
    sent_twice: f"sent twice: {NAME}", stale: "checksums", stale_head: "checksums .*model.embed_tokens.weight",
    rounded: "checksums", unknown: "unknown: lm_head.weight", reshaped: f"{NAME} is .* expected",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_stops_the_update_on_both_sides_and_the_next_one_heals(folders, engine, new, fault):
    old = held(engine)
    lines = Line.pair(20.0)
    for complaint in deliver(engine, fault(new, old), 4, lines):
        assert complaint is not None and re.search(FAULTS[fault], complaint)
    assert engine.version == 0 and "not complete" in serves(engine)
    assert deliver(engine, with_checksums(grouped(new)), 5, lines) == (None, None)
    assert engine.version == 5 and serves(engine) is None and equal(engine, new)


def test_a_head_of_its_own_must_come_too(folders):
    engine = started(folders["untied"])
    tensors = held(engine)
    del tensors["lm_head.weight"]
    sender, receiver = deliver(engine, grouped(tensors), 4)
    assert "missing: lm_head.weight" in sender and "missing: lm_head.weight" in receiver


def test_another_version_than_the_one_that_is_due_is_refused_before_anything_is_copied(engine, new):
    old = held(engine)
    sender, receiver = deliver(engine, grouped(new), 3, expected=4)
    assert "version 3" in sender and "version 3" in receiver and "version 4 was due" in receiver
    assert equal(engine, old) and serves(engine) is None


def test_a_type_that_the_engine_cannot_hold_is_refused(folders, new):
    engine = started(folders["old"], dtype=torch.bfloat16)
    sender, receiver = deliver(engine, grouped(new, torch.float16), 4)
    assert "float16" in receiver and "rollout_config.dtype" in receiver and receiver.partition(": ")[2] in sender


@pytest.mark.parametrize("sent", [torch.float64, torch.float8_e4m3fn, torch.int8, torch.bool])
def test_what_is_no_float_of_a_trainer_is_not_cast_into_one(new, sent):
    """Quantized values without their scales, say."""
    with pytest.raises(WeightUpdateError, match=f"{NAME} comes in {sent}, which the engine's torch.float32 cannot"):
        Inventory({NAME: new[NAME]}).take(WeightBucket({NAME: new[NAME].to(sent)}))


def test_checksums_of_what_the_engine_rounds_away_are_refused_with_the_way_out(folders, new):
    engine = started(folders["old"], dtype=torch.bfloat16)
    assert deliver(engine, grouped(new), 4) == (None, None) and equal(engine, new, torch.bfloat16)
    _, receiver = deliver(engine, with_checksums(grouped(new)), 5)
    assert "update_weight_checksum=False" in receiver


def skip_a_bucket(buckets, line, version, memory, device):
    """A sender that numbers its buckets as if one of them had been sent."""
    relayed = line.send

    def send(kind, files=(), **fields):
        if kind != "bucket" or fields["index"] != 1:
            relayed(kind, files, **fields)

    line.send = send
    send_weights(buckets, line, version, memory, device)


def overlapping(buckets, line, version, memory, device):
    """A sender that says of two tensors that they lie in the same place."""
    relayed = line.send

    def send(kind, files=(), **fields):
        if kind == "bucket":
            fields["tensors"][1][3] = fields["tensors"][0][3]
        relayed(kind, files, **fields)

    line.send = send
    send_weights(buckets, line, version, memory, device)


@pytest.mark.parametrize(
    "send, words",
    [(skip_a_bucket, r"bucket 2 came where bucket 1 was due.* weights are missing: model"),
     (overlapping, "said to lie in bytes 0 to .* weights are missing")],
)  # fmt: skip
def test_buckets_that_are_not_what_was_announced_are_named_with_all_that_lacks(engine, new, send, words):
    for complaint in deliver(engine, grouped(new), 4, send=send):
        assert complaint is not None and re.search(words, complaint)
    assert engine.version == 0 and serves(engine)


def test_nothing_waits_for_ever(engine, new):
    sender, receiver = Line.pair(0.3)
    start = time.perf_counter()
    with pytest.raises(WeightUpdateError, match="nothing came for 0.3 s .*taken was due"):
        send_weights(grouped(new), sender, 4, "host", CPU)
    sender, receiver = Line.pair(0.3)
    sender.update = "x"
    sender.send("begin", version=4)
    with pytest.raises(WeightUpdateError, match="nothing came for 0.3 s after begin.*weights are missing"):
        asyncio.run(receive_weights(engine, receiver, CPU))
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    "said", ["hello", "[1]", '{"kind": "taken"}', '{"kind": "taken", "update": "x"}', '{"kind": "done", "update": "x"}']
)
def test_an_update_ends_with_an_error_whatever_the_receiver_says(new, monkeypatch, said):
    sender, receiver = Line.pair(2.0)
    monkeypatch.setattr("secrets.token_hex", lambda n: "x")
    receiver._socket.sendall(len(said).to_bytes(8, "little") + said.encode())
    buckets = grouped(new)
    with pytest.raises(WeightUpdateError, match="version 4 of the weights did not reach the engine"):
        send_weights(buckets, sender, 4, "host", CPU)
    assert next(buckets, None) is None  # other ranks may wait for this one to gather the rest


def test_who_gave_up_and_went_is_quoted():
    sender, receiver = Line.pair(5.0)
    sender.update = receiver.update = "x"
    receiver.send("taken", index=0)
    receiver.refuse("the disk is full")
    receiver.close()
    with pytest.raises(DeliveryError, match="refused the update: the disk is full"):
        sender.send("bucket", index=1)
    with pytest.raises(DeliveryError, match="the other process is gone before the first message"):
        sender.send("bucket", index=2)


# ---------------------------------------------------------------- two processes


def receiver_process(line, folder, results, dies):
    torch.set_num_threads(1)
    engine = started(folder, load_weights=False)

    class Dying:
        async def update_weights(self, buckets, version):
            for _ in zip(range(2), buckets, strict=False):
                pass
            os._exit(9)

    asyncio.run(receive_weights(engine, line, CPU))
    results.put((engine.version, bit_sums(list(held(engine).values())).tolist()))
    asyncio.run(receive_weights(Dying() if dies else engine, line, CPU))
    results.put((engine.version, bit_sums(list(held(engine).values())).tolist()))


def sender_process(line, folder):
    torch.set_num_threads(1)

    def broken():
        for number, bucket in enumerate(grouped(dict(iter_hf_tensors(folder)))):
            if number == 3:
                os._exit(9)
            yield bucket

    send_weights(broken(), line, 4, "host", CPU)


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["update_helpers", __name__])
    return context


@pytest.mark.parametrize("dies", [False, True])
def test_an_engine_of_another_process_gets_two_updates_or_dies_in_the_second(processes, folders, new, dies):
    mine, its = Line.pair(60.0)
    results = processes.Queue()
    process = processes.Process(target=receiver_process, args=(its, folders["old"], results, dies))
    process.start()
    its.close()
    changed = {n: t * 1.5 for n, t in new.items()}
    order = list(held(started(folders["old"])))
    send_weights(with_checksums(grouped(new)), mine, 7, "host", CPU)
    assert results.get(timeout=60) == (7, bit_sums([new[n] for n in order]).tolist())
    buckets = grouped(changed)
    if dies:
        with pytest.raises(WeightUpdateError, match="version 8 .* did not reach the engine: the other process is gone"):
            send_weights(buckets, mine, 8, "host", CPU)
        assert next(buckets, None) is None  # other ranks may wait for this one to gather the rest
    else:
        send_weights(buckets, mine, 8, "host", CPU)
        assert results.get(timeout=60) == (8, bit_sums([changed[n] for n in order]).tolist())
    process.join(60)
    assert process.exitcode == (9 if dies else 0)


def test_a_sender_that_dies_leaves_an_engine_that_knows_what_it_lacks(processes, folders, engine):
    mine, its = Line.pair(60.0)
    process = processes.Process(target=sender_process, args=(its, folders["new"]))
    process.start()
    its.close()
    with pytest.raises(WeightUpdateError, match="the other process is gone after bucket 2.*weights are missing"):
        asyncio.run(receive_weights(engine, mine, CPU))
    assert "not complete" in serves(engine)
    process.join(60)
