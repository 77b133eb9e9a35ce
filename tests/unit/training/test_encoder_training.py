"""Pre-training and fine-tuning of an encoder that learns an artificial language in seconds."""

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from antiphon.architecture.config import preset
from antiphon.architecture.heads import FIRST_TOKEN_TASKS
from antiphon.checkpoints.checkpoint import load_checkpoint, read_tensors
from antiphon.errors import RecipeError
from antiphon.text.format import fill
from antiphon.training.batches import IGNORED_LABEL
from antiphon.training.command import frozen
from antiphon.training.corpus import Part, Tagged
from antiphon.training.losses import EncoderLoss, label_accuracy
from antiphon.training.masked_model import PretrainTask
from antiphon.training.recipe import PretrainRecipe, load_any_recipe
from antiphon.training.scores import first_tags, span_score, token_tags, words_of_tokens
from antiphon.training.task import Batches, RunFolders
from antiphon.training.trainer import Trainer
from antiphon.transformer.dropout import Dropout
from antiphon.transformer.layers import EncoderLayer
from antiphon.transformer.neighbour_start import OFFSETS, POSITION_SIZE
from tests.encoder_recipes import GROUP, commands, fine_tune_recipe, pretrain_recipe, pretrained
from tests.recipe_files import check_equal_weights, killed_at

pytestmark = pytest.mark.training

torch.set_num_threads(1)  # arrays this small are slower with several threads


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("base"), max_steps=150, peak_lr=1e-2, checkpoint_every_steps=30)


def test_pretraining_learns_masked_tokens(base: Path) -> None:
    """At each position of the language only a few words of the vocabulary of 330 are possible."""
    checkpoint = load_checkpoint(base)
    folder = base.parents[1]
    task = PretrainTask(pretrain_recipe(folder), RunFolders(data=folder, run=base.parent, group=GROUP))
    batches = task.batches("train", 1234)
    scores = label_accuracy(checkpoint.model, (batches[index] for index in range(len(batches))))
    assert scores["fill_mask_accuracy"] > 0.3
    losses = [json.loads(line)["valid_loss"] for line in (base.parent / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert checkpoint.text.mask_id == checkpoint.tokenizer.mask_id
    assert [head.task for head in checkpoint.config.heads] == ["fill_mask", "next_sentence"]
    assert checkpoint.provenance is not None
    assert checkpoint.provenance.recipe == "commands"


def test_resumed_pretraining_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """A run killed at step 17 resumes from step 10 with the same pairs, masks and dropout, so weights are equal."""
    whole = pretrained(tmp_path)
    recipe = pretrain_recipe(tmp_path)
    with killed_at(17):
        Trainer(recipe, tmp_path, tmp_path / "killed", GROUP).run()
    again = Trainer(recipe, tmp_path, tmp_path / "killed", GROUP).run()
    assert again is not None
    check_equal_weights(whole, again)


def test_losses_equal_those_of_the_outputs_of_the_heads(tmp_path: Path) -> None:
    """The reference is cross entropy over all outputs, text by text, without padding."""
    trainer = Trainer(pretrain_recipe(tmp_path), tmp_path, tmp_path / "run", GROUP)
    assert isinstance(trainer.task, PretrainTask)
    model = trainer.model.eval()
    batches = trainer.task.batches("valid", 0)
    index = next(i for i in range(len(batches)) if (batches[i].counts > 0).all())
    batch = batches[index]
    expected = dict.fromkeys(batch.labels, 0.0)
    for row, length in enumerate(batch.lens.tolist()):
        memory = model.encode(batch.ids[row, None, :length], None, batch.type_ids[row, None, :length])[0]
        for task, labels in batch.labels.items():
            wanted = labels[row, None] if task in FIRST_TOKEN_TASKS else labels[row, :length]
            outputs = model.read_out(task, memory[:1] if task in FIRST_TOKEN_TASKS else memory)
            loss = functional.cross_entropy(outputs, wanted, ignore_index=IGNORED_LABEL, reduction="sum")
            expected[task] += loss.item()
    with torch.no_grad():
        found = EncoderLoss(model).eval()(batch, 0.0)
    assert found.tolist() == pytest.approx(list(expected.values()), rel=1e-4)


def masked_texts(task: PretrainTask, epoch: int) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the texts and pairs of an epoch before masking, each with its labels; some occur more than once."""
    batches, found = task.batches("train", epoch), []
    for index in range(len(batches)):
        batch = batches[index]
        for ids, labels, length in zip(batch.ids, batch.labels["fill_mask"], batch.lens.tolist(), strict=True):
            original = ids.where(labels == IGNORED_LABEL, labels)[:length]
            found.append((tuple(original.tolist()), tuple(labels[:length].tolist())))
    return Counter(found)


@pytest.mark.parametrize("copies", [None, 1, 3])
def test_static_masks_return_after_their_copies_and_dynamic_ones_do_not(tmp_path: Path, copies: int | None) -> None:
    described = pretrain_recipe(tmp_path).model_dump()
    recipe = PretrainRecipe.model_validate({**described, "masking": {"copies": copies}})
    task = PretrainTask(recipe, RunFolders(data=tmp_path, run=tmp_path / "run", group=GROUP))
    first, *later = (masked_texts(task, epoch) for epoch in range(1, 5))
    assert [found == first for found in later] == {None: [False] * 3, 1: [True] * 3, 3: [False, False, True]}[copies]
    places = {tuple(label != IGNORED_LABEL for label in labels) for _, labels in first if len(labels) == 8}
    assert len(places) > 1, "texts of one length have masks of their own"
    plans = [[sorted(batch) for batch in task.batches("train", epoch).plan] for epoch in (1, 4)]
    assert plans[0] != plans[1], "batches are in another order in every epoch"


@pytest.mark.parametrize("changes", [{}, {"embedding_width": 16, "share_layers": True}, {"scale_embeddings": True}])
def test_heads_that_start_at_neighbours_attend_to_them(tmp_path: Path, changes: dict[str, object]) -> None:
    """Scores of attention are averaged over texts of random tokens, by the distance from query to key.

    Distance 0 is left out: a token is always similar to itself.
    """
    described = pretrain_recipe(tmp_path).model_dump()
    model = {**described["model"], "positions": "learned", "d_model": 64, "num_heads": 4, **changes}
    recipe = PretrainRecipe.model_validate({**described, "neighbour_start": True, "model": model})
    task = PretrainTask(recipe, RunFolders(data=tmp_path, run=tmp_path / "run", group=GROUP))
    encoder = task.make_model("eager").encoder
    assert encoder is not None
    length = task.config.max_source_len
    tokens, positions = encoder.embedding.weight.std() * encoder.embedding_scale, encoder.positions.vectors
    assert positions is not None
    assert (positions.std() / tokens).item() == pytest.approx(POSITION_SIZE)
    ids = torch.randint(task.config.vocab_size, (200, length), generator=torch.Generator().manual_seed(1))
    layer = encoder.layers[0]
    assert isinstance(layer, EncoderLayer)
    attention = layer.self_attention
    with torch.no_grad():
        states = encoder.embed(ids, torch.arange(length)[None])
        query, key, _ = attention.qkv(states).unflatten(-1, (3, *attention.heads)).unbind(dim=2)
        scores = torch.einsum("bqhd,bkhd->hqk", query, key) / len(ids)
    for head in range(4):
        means = {distance: float(scores[head].diagonal(distance).mean()) for distance in range(-8, 9) if distance}
        assert max(means, key=means.__getitem__) == OFFSETS[head]


def test_weights_of_an_initial_checkpoint_are_kept_by_neighbour_start(base: Path, tmp_path: Path) -> None:
    described = pretrain_recipe(tmp_path).model_dump()
    described["model"] |= {"positions": "learned"}
    recipe = PretrainRecipe.model_validate({**described, "neighbour_start": True})
    init = load_checkpoint(base)
    found = PretrainTask(recipe, RunFolders(data=tmp_path, run=tmp_path / "run", group=GROUP, init=init)).make_model(
        "eager"
    )
    for name, weight in init.model.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name


@pytest.mark.parametrize("changes", [{"positions": "rope"}, {"positions": "learned", "embedding_width": 15}])
def test_start_at_neighbours_is_refused_without_learned_positions_of_even_width(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    described = pretrain_recipe(tmp_path).model_dump()
    with pytest.raises(ValueError, match="neighbour_start needs"):
        PretrainRecipe.model_validate(
            {**described, "neighbour_start": True, "model": {**described["model"], **changes}}
        )


def test_without_pairs_documents_become_texts(tmp_path: Path) -> None:
    recipe = PretrainRecipe.model_validate({**pretrain_recipe(tmp_path).model_dump(), "next_sentences": False})
    task = PretrainTask(recipe, RunFolders(data=tmp_path, run=tmp_path / "run", group=GROUP))
    assert task.tasks == ("fill_mask",)
    found = {ids for ids, _ in masked_texts(task, 1)}
    documents = task.documents["train"]
    for index in range(len(documents)):
        sentences = documents.sentences_of(index)
        starts = documents.sentence_starts
        whole = documents.tokens[starts[sentences.start] : starts[sentences.stop]]
        assert fill(task.text, whole)[0] in found


@pytest.mark.parametrize(("dropout", "expected"), [(None, 0.25), (0.0, 0.0), (0.5, 0.5)])
def test_dropout_of_fine_tuning_is_the_recipes_or_that_of_pre_training(
    tmp_path: Path, dropout: float | None, expected: float
) -> None:
    described = pretrain_recipe(tmp_path, max_steps=1).model_dump()
    described["model"] |= {"dropout": 0.25}
    pretrain = PretrainRecipe.model_validate(described)
    init = Trainer(pretrain, tmp_path, tmp_path / "pretrained", GROUP).run()
    assert init is not None
    recipe = fine_tune_recipe(tmp_path, "classify").model_copy(update={"dropout": dropout})
    trainer = Trainer(recipe, tmp_path, tmp_path / "tuned", GROUP, init=load_checkpoint(init))
    assert max(module.p for module in trainer.model.modules() if isinstance(module, Dropout)) == expected


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_frozen_encoder_keeps_every_bit(base: Path, tmp_path: Path, task: str) -> None:
    init = load_checkpoint(base)
    recipe = frozen(fine_tune_recipe(tmp_path, task))
    trainer = Trainer(recipe, tmp_path, tmp_path / "run", GROUP, init=init)
    head = trainer.model.heads[task].state_dict()
    before = {name: tensor.clone() for name, tensor in head.items()}
    averaged = trainer.run()
    assert averaged is not None
    first, last = (read_tensors(path / "model.safetensors") for path in (base, averaged))
    encoder = [name for name in first if name.startswith("encoder.")]
    assert encoder
    for name in encoder:
        assert torch.equal(first[name], last[name]), name
    for name, tensor in before.items():
        assert not torch.equal(tensor, last[f"heads.{task}.{name}"]), name


def test_frozen_encoder_reads_without_dropout(base: Path, tmp_path: Path) -> None:
    recipe = frozen(fine_tune_recipe(tmp_path, "tag"))
    trainer = Trainer(recipe, tmp_path, tmp_path / "run", GROUP, init=load_checkpoint(base))
    trainer.batch_loss.train()
    assert trainer.model.heads.training
    assert trainer.model.encoder is not None
    assert not any(module.training for module in trainer.model.encoder.modules())


def test_classification_is_learned_and_scored(base: Path, tmp_path: Path) -> None:
    """The accuracy that training reports is equal to the accuracy of the checkpoint's outputs, text by text."""
    recipe = fine_tune_recipe(tmp_path, "classify", max_steps=40, checkpoint_every_steps=40)
    averaged = Trainer(recipe, tmp_path, tmp_path / "run", GROUP, init=load_checkpoint(base)).run()
    assert averaged is not None
    scores = json.loads((averaged / "scores.json").read_text())
    checkpoint = load_checkpoint(averaged)
    (head,) = checkpoint.config.heads
    test = commands(60, seed=4)
    right = 0
    for text, intent, _ in test:
        ids, _ = fill(checkpoint.text, checkpoint.tokenizer.encode(text))
        states = checkpoint.model.encode(torch.tensor([ids]))
        right += head.labels[int(checkpoint.model.read_out("classify", states[:, 0]).argmax())] == intent
    assert scores == {"accuracy": pytest.approx(right / len(test)), "texts": len(test)}
    assert scores["accuracy"] > 0.95
    assert checkpoint.provenance is not None
    assert checkpoint.provenance.source == "made up; made up too"


def test_tagging_is_learned_and_scored(base: Path, tmp_path: Path) -> None:
    """The reported F1 is that of the tags of first tokens, which this test finds by tokenising word by word."""
    recipe = fine_tune_recipe(tmp_path, "tag", max_steps=80, peak_lr=1e-2, checkpoint_every_steps=80)
    averaged = Trainer(recipe, tmp_path, tmp_path / "run", GROUP, init=load_checkpoint(base)).run()
    assert averaged is not None
    scores = json.loads((averaged / "scores.json").read_text())
    checkpoint = load_checkpoint(averaged)
    (head,) = checkpoint.config.heads
    assert head.labels[0] == "O"
    found = []
    for text, _, _ in commands(60, seed=4):
        words = [checkpoint.tokenizer.encode(word) for word in text.split()]
        ids, _ = fill(checkpoint.text, [token for word in words for token in word])
        labels = checkpoint.model.read_out("tag", checkpoint.model.encode(torch.tensor([ids]))[0]).argmax(dim=-1)
        starts = [1 + sum(map(len, words[:index])) for index in range(len(words))]
        found.append([head.labels[label] for label in labels[starts].tolist()])
    score = span_score([tags for _, _, tags in commands(60, seed=4)], found)
    assert scores["f1"] == pytest.approx(score.f1)
    assert scores["entities"] == score.expected
    assert scores["f1"] > 0.95


def num_labels(batches: Batches) -> int:
    return sum(int(batches[index].counts.sum()) for index in range(len(batches)))


def test_texts_beyond_the_model_are_cut_and_scored_as_outside(base: Path, tmp_path: Path) -> None:
    init = load_checkpoint(base)
    short = replace(init, config=init.config.model_copy(update={"max_source_len": 8}))
    recipe = fine_tune_recipe(tmp_path, "tag", max_steps=2)
    whole = Trainer(recipe, tmp_path, tmp_path / "whole", GROUP, init=init, keep_weights=False)
    cut = Trainer(recipe, tmp_path, tmp_path / "cut", GROUP, init=short, keep_weights=False)
    assert num_labels(cut.task.batches("test", 0)) < num_labels(whole.task.batches("test", 0))
    scores = [trainer.task.scores(trainer.model.eval(), "test")["entities"] for trainer in (whole, cut)]
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("words", "offsets", "expected"),
    [
        (["New", "York"], [(0, 3), (3, 8)], [0, 1]),
        (["New", "York"], [(0, 2), (2, 3), (4, 6), (6, 8)], [0, 0, 1, 1]),
        (["a", "\u3000", "b"], [(0, 1), (3, 5)], [0, 2]),
        (["New", "York"], [(0, 8)], [0]),
        (["New"], [(0, 0), (0, 3), (3, 3)], [None, 0, None]),
    ],
)
def test_words_of_tokens(words: list[str], offsets: list[tuple[int, int]], expected: list[int | None]) -> None:
    """Tokens with and without the leading space, words without token, tokens without word, a token over two words."""
    assert words_of_tokens(words, offsets) == expected


def test_every_token_of_a_word_has_a_label() -> None:
    item = Tagged(words=("in", "U.S."), tags=("O", "B-place"))
    offsets = [(0, 1), (1, 2), (2, 4), (4, 5), (5, 7)]
    assert token_tags(item, offsets) == ["O", "O", "B-place", "I-place", "I-place"]
    assert first_tags([0, 0, 1, 1, 1], ["O", "B-x", "B-place", "O", "O"], 2) == list(item.tags)
    assert first_tags([0], ["O"], 2) == ["O", "O"], "the second word was cut off"


def test_recipe_of_bert_differs_from_bert_base_only_in_size_and_dropout() -> None:
    recipe = load_any_recipe("bert-small")
    assert isinstance(recipe, PretrainRecipe)
    ours, published = (config.model_dump() for config in (recipe.model_config_for(16000), preset("bert-base")))
    sizes = {"vocab_size", "d_model", "encoder_layers", "num_heads", "d_ff", "max_source_len"}
    ids_and_heads = {"pad_id", "bos_id", "eos_id", "unk_id", "heads"}
    assert {name for name in ours if ours[name] != published[name]} <= sizes | ids_and_heads | {"dropout"}
    assert (recipe.masking.rate, recipe.masking.masked, recipe.masking.random) == (0.15, 0.8, 0.1)


def test_scores_at_the_end_are_those_of_documents_held_out_twice(base: Path) -> None:
    """Neither training nor validation has a document of the test part."""
    folder = base.parents[1]
    task = PretrainTask(pretrain_recipe(folder), RunFolders(data=folder, run=base.parent, group=GROUP))
    checkpoint = load_checkpoint(base)
    assert json.loads((base / "scores.json").read_text()) == task.scores(checkpoint.model, "test")
    parts: tuple[Part, ...] = ("train", "valid", "test")
    texts = [{tuple(example.ids) for example in task.texts[part]} for part in parts]
    assert sum(map(len, texts)) == len(texts[0] | texts[1] | texts[2])
    assert all(len(task.documents[part]) >= 2 for part in parts)


def test_labels_missing_in_the_training_data_are_named(base: Path, tmp_path: Path) -> None:
    recipe = fine_tune_recipe(tmp_path, "classify")
    (file,) = fine_tune_recipe(tmp_path, "classify").data.test
    unknown = tmp_path / "unknown.tsv"
    unknown.write_text("sing a song\tsing\n")
    other = file.model_copy(update=dict(path=unknown.name, sha256=hashlib.sha256(unknown.read_bytes()).hexdigest()))
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"test": (other,)})})
    with pytest.raises(RecipeError, match=r"data\.test has labels that data\.train does not have: sing"):
        Trainer(recipe, tmp_path, tmp_path / "run", GROUP, init=load_checkpoint(base))


def test_random_weights_use_only_shape_and_tokenizer_of_the_checkpoint(base: Path, tmp_path: Path) -> None:
    init = load_checkpoint(base)
    recipe = fine_tune_recipe(tmp_path, "classify")
    kept = Trainer(recipe, tmp_path, tmp_path / "kept", GROUP, init=init)
    drawn = Trainer(recipe, tmp_path, tmp_path / "drawn", GROUP, init=init, keep_weights=False)
    first, names = init.model.state_dict(), ["encoder.embedding.weight", "heads.classify.transform.weight"]
    first["heads.classify.transform.weight"] = first["heads.next_sentence.transform.weight"]  # BERT's pooler
    for name in names:
        assert torch.equal(kept.model.state_dict()[name], first[name])
        assert not torch.equal(drawn.model.state_dict()[name], first[name])
    assert drawn.model_config == kept.model_config
    assert drawn.task.tokenizer.encode("play music") == init.tokenizer.encode("play music")
