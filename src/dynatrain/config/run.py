"""The configuration of a run, as frozen values. What the numbers mean together is judged by ``space.run_check``."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST = 2**31 - 1
"""Of anything that is counted: more than any run has, and products of two still fit into 64 bits."""
Count = Annotated[int, Field(ge=1, le=MOST)]
Ranks = Annotated[int, Field(ge=1, le=1 << 16)]
WholeNumber = Annotated[int, Field(ge=0, le=MOST)]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the configuration: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class World(Section):
    """The processes that train, and how many there may be."""

    size: Ranks | None = None
    """Ranks at the start; by default as many as the layout has."""
    min: Ranks = 1
    """Fewest ranks that the run may be scaled to."""
    max: WholeNumber = 0
    """Most ranks; 0 for as many as there are places."""
    sizes: tuple[Ranks, ...] = ()
    """The only numbers of ranks; empty for any."""
    step: Ranks = 1
    """What every number of ranks is a multiple of, for example the devices of a node."""
    interface: str = ""
    """Network interface on which agents of other machines reach the run, and which its ranks use; empty for this
    machine alone, or under a launcher for what that says."""
    spares: WholeNumber = 0
    """Ranks that are kept ready, on top of those that train: started and waiting in a place of their own, for a change
    of members or as a replacement."""
    grace: Seconds = 30.0
    """Seconds from SIGTERM on one host of several until it is taken away: half of them are for its ranks to hand over
    and leave, the other half to save and stop the run where they cannot."""


class Model(Section):
    """What is trained."""

    config: str = "tiny"
    """A preset's name, or the path of a Hugging Face config.json or of the folder that has it."""
    dropout: BelowOne | None = None
    """Probability of dropping an element that enters the residual stream; by default what the model's config says."""
    attention_dropout: BelowOne | None = None
    """Probability of dropping a probability of attention; by default what the model's config says."""


class Data(Section):
    """What it is trained on."""

    paths: tuple[str, ...] = ()
    """Files of text (.txt, .py, .jsonl, .parquet, WebDataset .tar) and folders of them, or Megatron's .bin or .idx with
    tokens; empty for the Python standard library's own sources."""
    text_column: str = "text"
    """Where the text is: a column of .parquet, a key of the objects in .jsonl and of a .tar's .json members."""
    tokenizer: Literal["bpe", "bytes", "model"] = "bpe"
    """Byte-level BPE, trained on the documents at the first start; one token per byte; or the tokenizer.json beside the
    model's config.json. Unused with .bin and .idx."""
    vocab_size: Annotated[int, Field(ge=257, le=MOST)] = 4096
    """Entries of the BPE vocabulary; unused with bytes and model, and with .bin
    and .idx, whose tokens the model must know."""
    sequence: Annotated[int, Field(ge=2, le=MOST)] = 256
    """Tokens of one sequence."""
    document_mask: bool = False
    """A sequence is cut out of documents that stand one behind the other; let no token attend to another document, and
    count positions from the beginning of each."""
    validation: BelowOne = 0.05
    """Fraction of the documents that is held out."""


class Batch(Section):
    """How many sequences make a step; a layout does not change it."""

    global_sequences: Count = 16
    """Sequences of one step, over all ranks."""
    micro_sequences: Count = 2
    """Sequences that go through the model together; divides global_sequences."""


class Optimizer(Section):
    """The optimizer and its learning rate: linear warm-up, then a cosine down to a floor, in steps."""

    name: Literal["adamw", "sgd", "adafactor", "muon", "adamw8bit"] = "adamw"
    """Which; muon leaves embeddings, head and vectors to AdamW, adamw8bit keeps the moments of matrices in bytes."""
    lr: Positive = 1e-3
    """Highest learning rate."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay of AdamW's first and second moment, per step."""
    eps: Positive = 1e-8
    """Added to the root of AdamW's second moment."""
    momentum: Annotated[BelowOne, Field(gt=0)] = 0.9
    """Decay of the momentum of sgd and muon, per step."""
    bf16_newton_schulz: bool = False
    """Have muon make updates orthogonal in bf16: faster; then layouts agree to a few digits only."""
    weight_decay: NotNegative = 0.1
    """Decay of matrices as a multiple of the learning rate: decoupled, in sgd added to the gradient."""
    warmup_steps: WholeNumber | None = None
    """Steps until the learning rate is at its highest; by default a tenth of all, at most 10."""
    min_lr_ratio: Share = 0.1
    """Learning rate at the end of the cosine, as a fraction of the highest."""
    decay_steps: Count | None = None
    """Step at which the cosine ends; by default the steps that the run was begun with, whatever it goes on to."""
    clip_norm: NotNegative = 1.0
    """Largest global norm of the gradients; 0 does not clip."""
    exact_norm: bool = False
    """Sum the squares of each row in one order, so that the norm has the same bits in every layout."""


class Precision(Section):
    """Element types."""

    compute: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Type of the computation. Parameters and moments are kept in fp32, with fp64 in fp64."""


class Blocks(Section):
    """How each transformer block is run."""

    recompute: Literal["none", "full", "selective"] = "none"
    """Activation checkpointing, which saves memory for time: compute a block's forward again in its backward, all of it
    or all but matrix products and attention."""
    compile: bool = False
    """Compile each block with torch.compile, in layouts without tp and zero-bubble schedules; experts, dropout and
    attention over ranks of cp stay as they are."""


class Pipeline(Section):
    """How micro-batches pass through pipeline stages."""

    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """One forward, one backward in turn; or all forwards, then all backwards."""


class Validation(Section):
    """The loss on held-out documents (data.validation), at intervals, in whatever layout is there."""

    every: WholeNumber = 0
    """Steps between two validations; 0 for none."""
    batches: Count = 4
    """Global batches of one validation, at most; always the same samples, each once."""


class Switching(Section):
    """How a change of layout is carried out."""

    mode: Literal["keep", "tight", "auto"] = "auto"
    """Keep the old state to the commit; hand it over tensor by tensor; or keep it where it fits, else hand it over."""
    deadline_seconds: Seconds = 60.0
    """Longest time of one phase, in seconds; then the late ranks are named and the switch is given up."""
    budget_mib: WholeNumber = 0
    """Memory of a rank in mode tight beyond the larger of its old and its new state, in MiB; 0 for what suffices."""
    unequal_copies: Literal["refuse", "owner"] = "refuse"
    """What becomes of copies of one state that differ before a switch: it is refused; or all get what the first one
    holds, as the log and the certificate then tell."""


class Save(Section):
    """Checkpoints, in the run's folder under checkpoints/."""

    every: WholeNumber = 0
    """Steps between two saves, beside training (near a scheduled switch, behind it); 0 for none by themselves."""
    at_end: bool = True
    """Save when the run ends, and when it is stopped by SIGTERM or by dynatrain stop."""
    keep_last: Count = 2
    """Checkpoints that stay."""
    snapshot_mib: WholeNumber = 0
    """Memory of a rank for copies that wait for the disk, in MiB; 0 for as much as a save needs."""
    deadline_seconds: Seconds = 600.0
    """Longest time of a save, in seconds; then it is given up, and training goes on."""
    grace_seconds: Seconds = 60.0
    """Seconds from SIGTERM to the last save's end; then all ranks are ended, saved or not."""


class Loss(Section):
    """What is done against the loss of ranks without warning, beside copies and checkpoints."""

    snapshot_steps: WholeNumber = 0
    """Steps between two snapshots in memory: of all that a rank trains with in its own, of what it alone has in that of
    another; a run that loses ranks goes back that many steps at most. 0 for none."""
    snapshot_mib_per_second: Positive = 50.0
    """Most that a rank sends of a snapshot, in MiB a second."""
    replacements: WholeNumber = 0
    """How many lost ranks are replaced by themselves, from one start of the run to its end: the run goes on without
    them at once, and is scaled back to the layout before as soon as that is done; 0 for none."""


STEPS_BETWEEN = 3
"""Fewest steps from one scheduled switch to the next: a switch is decided in the first step of its layout, and the next
is announced two steps before its own."""


class Switch(Section):
    """One scheduled change of layout."""

    step: Count
    """The first step that runs in the new layout; steps count from 0."""
    layout: str
    """The new layout, as text."""
    after_micro_batches: WholeNumber = 0
    """Micro-batches of that step (batch.global_sequences / batch.micro_sequences) that still run in the old layout: the
    switch carries their gradients; 0 switches at the step's edge."""


class RunConfig(Section):
    """All that a run is asked to do."""

    layout: str = "dp1"
    """The layout at the start, as text (fsdp2.tp2)."""
    steps: Count = 200
    """Optimizer steps of the whole run."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of initial weights, dropout and sample order."""
    loop: str = ""
    """A loop of your own, FILE.py:FUNCTION, that each rank runs in place of the one here: FUNCTION(run). Of [model] the
    config.json says which layouts there can be; [data], [batch], [optimizer], [precision], [blocks] and [validation]
    mean nothing then."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; auto takes GPUs where there are any."""
    world: World = World()
    model: Model = Model()
    data: Data = Data()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    precision: Precision = Precision()
    blocks: Blocks = Blocks()
    pipeline: Pipeline = Pipeline()
    validation: Validation = Validation()
    switching: Switching = Switching()
    save: Save = Save()
    loss: Loss = Loss()
    switch: tuple[Switch, ...] = ()
    """Scheduled changes of layout, in the order of their steps."""
