"""The tiny models are fit for tests: reproducible, loadable, sensitive to early tokens, and text round-trips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from skippy.model import Model, ModelContext
from skippy.template import ChatTemplate
from tests.tiny_models import CONTROL, FAMILIES, N_VOCAB, WINDOW, write_model

TEXT = "The answer and the thing, in Ελλάδα, 東京 and São Paulo: {0}\n\tnaïve 🦜 <0x41>  two spaces "
TOKENS = np.random.default_rng(0).integers(len(CONTROL), N_VOCAB, 300).astype(np.int32)
PROMPT = TOKENS[:24]
assert len(PROMPT) < WINDOW

Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    model = Model(write_model(name, tmp_path_factory.mktemp("tiny") / f"{name}.gguf"))
    yield model
    model.close()


@pytest.fixture(scope="module")
def context(model: Model) -> Iterator[ModelContext]:
    context = model.new_context(n_ctx=512, n_seq_max=4, n_threads=1)
    yield context
    context.close()


@pytest.fixture
def logits(context: ModelContext) -> Callable[[npt.NDArray[np.int32]], Logits]:
    """The logits after tokens that an empty sequence 0 decodes."""

    def decode(tokens: npt.NDArray[np.int32]) -> Logits:
        assert context.sequences.seq_rm(0)
        assert context.sequences.decode(0, 0, tokens) == 0
        return context.logits()

    return decode


def test_same_name_and_seed_make_the_same_bytes(name: str, model: Model, tmp_path: Path) -> None:
    first = Path(model.path).read_bytes()
    assert write_model(name, tmp_path / "again").read_bytes() == first
    twin = write_model(name, tmp_path / "twin", seed=1).read_bytes()
    assert twin != first
    assert len(twin) == len(first)


def test_family(name: str, model: Model) -> None:
    assert model.family == FAMILIES[name].family


def test_text_comes_back(model: Model) -> None:
    assert model.detokenize(model.tokenize(TEXT, special=False)) == TEXT


def test_every_piece_is_reached(model: Model) -> None:
    pieces = range(len(CONTROL) + 256, N_VOCAB)
    assert [model.tokenize(model.detokenize([token]), add_bos=False) for token in pieces] == [[t] for t in pieces]


def test_control_tokens(model: Model) -> None:
    assert model.tokenize("".join(CONTROL), add_bos=False) == list(range(len(CONTROL)))
    assert model.detokenize(range(1, len(CONTROL))) == ""
    ends = [CONTROL[token] for token in range(len(CONTROL)) if model.is_end(token)]
    assert ends == ["</s>", "<|im_end|>"]


def test_chat_template(model: Model) -> None:
    text = ChatTemplate(model).render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_logits_are_finite_and_spread(context: ModelContext) -> None:
    assert context.sequences.seq_rm(0)
    assert context.sequences.decode(0, 0, TOKENS, "all") == 0
    found = np.stack([context.logits(i) for i in range(len(TOKENS))])
    assert np.isfinite(found).all()
    assert 1 < found.std(axis=1).min() <= found.std(axis=1).max() < 3


def test_an_early_token_shows_in_late_logits(logits: Callable[[npt.NDArray[np.int32]], Logits]) -> None:
    other = PROMPT.copy()
    other[3] ^= 1  # its neighbour in the vocabulary
    first = logits(PROMPT)
    assert np.abs(logits(other) - first).max() > 0.1
    assert np.array_equal(logits(PROMPT), first)  # it is the token, not the run


def test_a_greedy_answer_goes_on(
    model: Model, context: ModelContext, logits: Callable[[npt.NDArray[np.int32]], Logits]
) -> None:
    answer = [int(logits(PROMPT).argmax())]
    while len(answer) < 16:
        assert context.sequences.decode(0, len(PROMPT) + len(answer) - 1, np.array(answer[-1:], np.int32)) == 0
        answer.append(int(context.logits().argmax()))
    assert not any(model.is_end(token) for token in answer)
    assert len(set(answer)) >= 8, answer
