"""What a rank observes arrives as it was, whatever its type; what a rank sends that is no observation does no harm."""

import json
import socket

import pytest
import torch

from lockstep import ranks
from lockstep.ranks.channel import Channel, ChannelError, decode, encode

TENSORS = {
    "float32": torch.arange(6.0).reshape(2, 3),
    "float64": torch.tensor([1e300, -0.0]),
    "bfloat16": torch.tensor([1.0, 3.140625], dtype=torch.bfloat16),
    "float16": torch.tensor([0.5], dtype=torch.float16),
    "bool": torch.tensor([True, False]),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "int64": torch.tensor([2**62]),
    "complex64": torch.tensor([1 + 2j]),
    "0-dim": torch.tensor(7.0),
    "empty": torch.empty(0, 3),
    "empty bool": torch.empty(2, 0, dtype=torch.bool),
    "not contiguous": torch.arange(12.0).reshape(3, 4).T,
    "a slice": torch.arange(12.0)[2:9:3],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "channels last": torch.rand(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "with gradient": torch.ones(2, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "not a number": torch.tensor([float("nan"), float("inf")]),
    "sparse": torch.tensor([[0.0, 1.0]]).to_sparse(),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back(name: str) -> None:
    tensor = TENSORS[name]
    tree, blob = encode(tensor)
    back = decode(json.loads(json.dumps(tree)), blob)
    plain = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    assert back.dtype == plain.dtype and back.shape == plain.shape
    assert torch.equal(
        back.nan_to_num() if back.is_floating_point() else back,
        plain.nan_to_num() if back.is_floating_point() else plain.resolve_conj(),
    )
    if back.numel():
        back.zero_()  # it owns its memory


def test_nested_values_come_back() -> None:
    value = {
        "a": [1, 2.5, None, True, "ü"],
        "b": {"c": (torch.ones(2), [torch.zeros(1, dtype=torch.bfloat16)])},
        "none": {},
        "big": 2**80,
        "infinite": float("inf"),
    }
    back = decode(*_through_json(value))
    assert back["a"] == value["a"] and back["big"] == 2**80 and back["infinite"] == float("inf")
    assert torch.equal(back["b"]["c"][0], torch.ones(2)) and back["b"]["c"][1][0].dtype == torch.bfloat16


def _through_json(value: object) -> tuple[object, bytes]:
    tree, blob = encode(value)
    return json.loads(json.dumps(tree)), blob


def test_numpy_comes_back_as_tensors() -> None:
    numpy = pytest.importorskip("numpy")
    assert decode(*_through_json(numpy.arange(3)[::-1])).tolist() == [2, 1, 0]
    assert decode(*_through_json(numpy.float32(2.5))).item() == 2.5
    assert decode(*_through_json(numpy.bool_(True))).item() is True


def test_a_dictionary_that_looks_like_a_note() -> None:
    value = {"$tensor": {"dtype": "float32", "shape": [10**9], "at": 0, "bytes": 4}}
    assert decode(*_through_json(value)) == value


def test_code_is_no_observation() -> None:
    with pytest.raises(TypeError, match="not function"):
        encode({"f": test_code_is_no_observation})


@pytest.mark.parametrize("note", [
    {}, {"dtype": "float32"}, {"dtype": "nn", "shape": [1], "at": 0, "bytes": 4},
    {"dtype": "float32", "shape": [2], "at": 0, "bytes": 4},
    {"dtype": "float32", "shape": [1], "at": 9, "bytes": 4},
    {"dtype": "float32", "shape": [10**12], "at": 0, "bytes": 0},
    {"dtype": "float32", "shape": [-1], "at": 0, "bytes": 0},
    {"dtype": "float32", "shape": "x", "at": 0, "bytes": 4},
    {"dtype": "float32", "shape": [1], "at": -1, "bytes": 4},
    7,
])  # fmt: skip
def test_a_forged_note_is_refused(note: object) -> None:
    with pytest.raises(ChannelError):
        decode({"$tensor": note}, bytes(4))


@pytest.mark.parametrize("junk", [
    b"\xff" * 64, b"\0\0\0\2\0\0\0\0[]", b"\0\0\0\2\0\0\0\0{x", b"\x7f\xff\xff\xff\0\0\0\0",
])  # fmt: skip
def test_junk_is_no_message(junk: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(junk)
        with pytest.raises(ChannelError):
            Channel(ours).receive()


def test_observations_of_each_rank() -> None:
    text = (
        "import torch\nfrom lockstep import ranks\nimport os\nrank = int(os.environ['RANK'])\n"
        "ranks.observe('loss', torch.tensor(rank + 0.5))\nif rank: ranks.observe('only', [rank])\n"
        "ranks.observe('large', torch.ones(4 << 20))"
    )
    run = ranks.run(ranks.Source(text), 2)
    assert [loss.item() for loss in run.observed("loss")] == [0.5, 1.5]
    assert run.observed("only") == [None, [1]]
    assert [large.numel() for large in run.observed("large")] == [4 << 20] * 2


def test_an_observation_that_is_too_large_is_the_learners_error() -> None:
    text = "import torch\nfrom lockstep import ranks\nranks.observe('all', torch.ones(80 << 20))"
    run = ranks.run(ranks.Source(text), 1)
    assert run.cause is not None and run.cause.kind == "raised"
    assert "observation 'all'" in run.cause.headline


def test_too_many_observations_end_the_rank() -> None:
    text = "import torch\nfrom lockstep import ranks\nwhile True: ranks.observe('x', torch.ones(4 << 20))"
    run = ranks.run(ranks.Source(text), 1)
    assert run.cause is not None and run.cause.kind == "too much output", run.cause


GARBAGE = """\
import gc, json, os, struct, time
from lockstep.ranks import recorder
channel = recorder.current().channel
def say(message, blob=b""):
    channel.send(message, blob)
for message in ({"event": "sample"}, {"event": "sample", "id": 0, "stack": 3}, {"event": "begin"},
                {"event": "begin", "time": "x"},
                {"event": "end", "number": [], "time": 1}, {"event": "watcher", "thread": "x"},
                {"event": "exit", "code": None},
                {"event": "raised", "type": 3, "frames": {"a": 1}} if FINAL else {}, {"event": 7}, {}, {"event": None},
                {"event": "mark", "number": 1, "name": {}, "time": {}},
                {"event": "hello", "role": "rank", "rank": 0},
                {"event": "observe", "name": 3, "value": {"$tensor": 3}}, {"event": "rank", "rank": 3},
                {"event": "hello"}, {"event": "hello", "role": "worker", "rank": 0, "pid": 1}):
    say(message)
"""


@pytest.mark.parametrize("final", [False, True])
def test_garbage_on_the_channel_does_no_harm(final: bool) -> None:
    run = ranks.run(ranks.Source(GARBAGE.replace("FINAL", str(final))), 2)
    assert run.ok != final
    if final:
        assert run.cause is not None and run.cause.kind == "raised"


def test_bytes_that_are_no_message_end_the_conversation_only() -> None:
    text = (
        "import time\nfrom lockstep.ranks import recorder\n"
        "recorder.current().channel.socket.sendall(b'\\xff' * 100)\ntime.sleep(0.3)"
    )
    run = ranks.run(ranks.Source(text), 2)
    assert not run.ok  # nobody heard them return


def test_a_rank_cannot_be_another() -> None:
    text = """
import os, socket, json, struct, time
if os.environ["RANK"] == "0":
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(os.path.join(os.path.dirname(os.environ["TMPDIR"]), "attach"))
        hello = {"event": "hello", "role": "rank", "rank": 1, "pid": os.getppid()}
        for message in (hello, {"event": "raised", "type": "X"}):
            header = json.dumps(message).encode()
            other.sendall(struct.pack("!II", len(header), 0) + header)
        time.sleep(0.2)
"""
    run = ranks.run(ranks.Source(text), 2)
    assert run.ok, run.cause
