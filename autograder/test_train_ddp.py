"""What `train_ddp` has to do.

    train_ddp(rank, world_size, model_class, data, epochs, *, batch_size=32, lr=0.1) -> nn.Module

The ranks report which samples each batch held. From these the whole training is computed again in one process, rightly
and with every usual mistake (`judging.train_ddp`): the one that gives the submission's own numbers is the diagnosis.
"""

from __future__ import annotations

import pytest
from judging.train_ddp import (
    BACKWARD,
    CLOSE,
    EPOCHS,
    FUNCTION,
    LOOP,
    LOSS_LINE,
    PRINT,
    SCALED_RATE,
    WRAP,
    Training,
    as_given,
    by_epoch,
    carriers,
    dataset,
    judge_bytes,
    judge_cleanup,
    judge_drift,
    judge_each_step,
    judge_global_state,
    judge_output,
    judge_repeats,
    loss_mistakes,
    moved_after_wrapping,
    reduced_in_backward,
    replay,
    say_apart,
    train,
    under_rank_condition,
    uneven_loss_mistakes,
    weight_mistakes,
    wraps,
)

from lockstep.grading import Cause, Diagnosis, Each, Grader, Hypothesis, Run, Tolerance, evidence, names, show

# BATCH and WORLD differ, so that a sum over the one is not mistaken for a sum over the other.
NODES = 2
WORLD, SAMPLES, BATCH, RATE = 4, 96, 6, 0.25
SHARE, EVERYBODY = SAMPLES // WORLD, range(WORLD)
UNEVEN_WORLD, UNEVEN_SAMPLES = 3, 55  # shares of 19, 18 and 18: four batches or three
MAIN_LOSS, UNEVEN_LOSS = Tolerance(0.0, 2e-3), Tolerance(0.0, 5e-4)

TRAIN_CALL = r"\btrain_ddp\(.*(?<!:)$ || " + FUNCTION
LOADER = r"DataLoader\( || Sampler\( || " + FUNCTION


def main_run(grader: Grader) -> Training:
    """The run that most checks look at: everything divides evenly, and local ranks are not the ranks."""
    return train(grader, WORLD, SAMPLES, nodes=NODES, batch_size=BATCH, lr=RATE)


def uneven_run(grader: Grader) -> Training:
    """The shares have to be filled up, and the last batch of an epoch is smaller. No launcher says which rank it is."""
    return train(grader, UNEVEN_WORLD, UNEVEN_SAMPLES, told=False, batch_size=BATCH, lr=RATE)


def broken_run(grader: Grader) -> Run:
    """Once the caller is in a group already, once the model fails in its second epoch."""
    x, y = dataset(grader, SAMPLES)
    return grader.run("breaks", 2, x=as_given(x), y=y, epochs=EPOCHS, options={"batch_size": BATCH})


def jobs_run(grader: Grader) -> Run:
    """Three jobs of two ranks, in which one sample is repeated. Two have the same global random state, the third another."""
    x, y = dataset(grader, SAMPLES - 1)
    draw = grader.random("global random state")
    one, other = draw.randrange(1 << 20), draw.randrange(1 << 20, 1 << 21)
    each = [{"seed": seed} for seed in (one, one, one, one, other, other)]
    return grader.run("jobs", 6, each=each, x=as_given(x), y=0 * y, epochs=EPOCHS, options={"batch_size": BATCH})


def say_counts(counts: list[int]) -> str:
    """`rank 0: 4, rank 1: 3`."""
    return ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))


def read_failure(grader: Grader, run: Run, cause: Cause) -> Diagnosis | None:
    """Name what a failed run of this exercise usually means."""
    table, error = evidence(run), cause.error.message if cause.error is not None else ""
    if cause.kind in ("hang", "mismatch"):
        frames = [row.frame for row in cause.rows if row.frame and row.frame.file == str(grader.submission.file)]
        guarded = [frame for frame in frames if under_rank_condition(grader.submission.text, frame.line)]
        steps = reduced_in_backward(run)
        if guarded:
            at = min(guarded, key=lambda frame: frame.line)
            who = names(row.rank for row in cause.rows if row.frame == at)
            said = f"Only {who} called the collective at line {at.line}, which all ranks must call."
            return grader.diagnosis("rank-conditional-collective", said, evidence=table, of=cause.ranks, at=at)
        if len(set(steps)) > 1:
            said = f"The ranks took different numbers of steps (backward passes: {say_counts(steps)})."
            skip = r"^\s+(continue|break)\b" if grader.line("DistributedSampler") else ""
            parted = cause.parted if cause.parted and cause.parted.file == str(grader.submission.file) else None
            at = skip if skip and grader.line(skip) else parted or LOADER
            return grader.diagnosis("uneven-data-hang", said, evidence=table, of=cause.ranks, at=at)
    if "mutually exclusive with shuffle" in error:
        said = f"{names(cause.ranks).capitalize()} raised {cause.error}"
        return grader.diagnosis("sampler-and-shuffle", said, of=cause.ranks, at=LOADER)
    if "NCCL" in error:
        return grader.diagnosis("hard-coded-backend", cause.headline, evidence=table, of=cause.ranks, at=r"nccl")
    return None


# What comes back, and which samples each rank saw --------------------------------------------------------------------


def test_trains_on_every_rank(grader: Grader) -> None:
    """trains on every rank and returns the module itself"""
    training = main_run(grader)
    run, kinds = training.run, training.run.observed("type")
    idle = [rank for rank, steps in enumerate(training.steps) if not steps]
    grader.fail_on(idle, "no-training", "The model was never called on a batch on {ranks}.", at=TRAIN_CALL)
    wrapped = [rank for rank, yes in enumerate(run.observed("is_wrapped")) if yes]
    said = "It returned a {} on {{ranks}}. Its state_dict has keys like 'module.first.weight', which a plain model cannot load."
    kind = kinds[wrapped[0]] if wrapped else ""
    grader.fail_on(wrapped, "wrapped-model-returned", said.format(kind), at=r"return .*(ddp|model|net) || return")
    other = [rank for rank, yes in enumerate(run.observed("is_module")) if not yes]
    said = f"It returned {kinds[other[0]] if other else ''} on {{ranks}}, instead of the trained module."
    grader.fail_on(other, "nothing-returned", said, at=FUNCTION)


@pytest.mark.needs("test_trains_on_every_rank")
def test_each_sample_on_one_rank(grader: Grader) -> None:
    """every sample is seen, each by one rank only"""
    training = main_run(grader)
    judge_amount(grader, training)
    a_node = WORLD // NODES
    seen = [sorted(order[0]) for order in training.orders]
    for epoch in range(EPOCHS):
        owners = training.owners(epoch)
        shared = [sample for sample, ranks in owners.items() if len(ranks) > 1]
        nobody = f"{SAMPLES - len(owners)} samples were not used at all"
        if shared and all(seen[rank] == seen[rank % a_node] for rank in EVERYBODY):
            said = f"On {NODES} nodes with {a_node} ranks each, rank {a_node} saw the samples of rank 0: both are local rank 0 of their nodes. {nobody}. Choose the shard by the global rank."
            grader.fail("same-shard", said, of=range(0, WORLD, a_node), at=r"LOCAL_RANK|local_rank || " + LOADER)
        if shared:
            ranks = owners[shared[0]]
            said = f"In epoch {epoch} {len(shared)} samples were used by more than one rank (sample {shared[0]} by {names(ranks)}), and {nobody}: the ranks don't shard the same permutation."
            grader.fail("seed-per-rank-sampler", said, of=ranks, at=r"seed || " + LOADER)
    judge_missing(grader, training)


def judge_amount(grader: Grader, training: Training) -> None:
    """How many samples each rank saw, whichever they are."""
    seen = [sorted(set(order[0])) for order in training.orders]
    counts = [sum(map(len, batches)) for batches in training.batches]
    most, alike = max(map(len, seen)), seen[1:] == seen[:-1]
    everything = all(len({sample for epoch in order for sample in epoch}) == SAMPLES for order in training.orders)
    passes = counts[0] // SHARE if counts == [counts[0] // SHARE * SHARE] * WORLD else 0
    same = (
        f"All {WORLD} ranks saw the same {most} samples: {show(seen[0])}. The other {SAMPLES - most} were never used."
    )
    whole = f"Every rank used all {SAMPLES} samples; a shard is {SHARE}. The same work is done {WORLD} times over."
    often = f"epochs={EPOCHS} was asked for, but each rank went through its shard of {SHARE} samples {'once' if passes == 1 else f'{passes} times'}."
    makes = f"In {EPOCHS} epochs a rank's shard of {SHARE} samples makes {SHARE * EPOCHS}"
    for applies, id, said, at in (
        (alike and most < SAMPLES and counts[0] <= SHARE * EPOCHS, "same-shard", same, LOADER),
        (everything and min(counts) >= SAMPLES, "no-sampler", whole, LOADER),
        (passes not in (0, EPOCHS), "fixed-epochs", often, LOOP),
        (passes != EPOCHS, "drops-samples", f"{makes}; seen were {say_counts(counts)}.", LOADER),
    ):
        grader.fail_on(EVERYBODY if applies else (), id, said, at=at)


def judge_missing(grader: Grader, training: Training) -> None:
    """Every sample is seen in every epoch."""
    count = len(training.x)
    for epoch in range(EPOCHS):
        missing = sorted(set(range(count)) - set(training.owners(epoch)))
        if missing:
            said = f"In epoch {epoch} {len(missing)} of {count} samples were not used ({show(missing)})."
            grader.fail("drops-samples", said, at=r"drop_last || " + LOADER)


@pytest.mark.needs("test_each_sample_on_one_rank")
def test_batch_size(grader: Grader) -> None:
    """each rank's batches have batch_size samples, with the inputs as they are in data"""
    training = main_run(grader)
    sizes = training.sizes
    said = f"Expected batches of {BATCH} samples per rank (batch_size); got batches of {show(sizes)}."
    grader.fail_on(EVERYBODY if sizes != [BATCH] else (), "ignores-batch-size", said, at=r"batch_size || " + LOADER)
    x = as_given(training.x)
    held = f"{x.dtype} of shape {tuple(x.shape[1:])}"
    changed = {rank: got for rank, got in enumerate(training.run.observed("inputs")) if got != [held]}
    got = " and ".join(min(changed.values(), default=[]))
    said = f"Each input in data is {held}. The model on {{ranks}} got inputs that are {got}."
    grader.fail_on(changed, "changes-inputs", said, at=r"float\(|flatten|reshape|view || " + LOOP)


@pytest.mark.needs("test_each_sample_on_one_rank")
def test_reshuffles(grader: Grader) -> None:
    """every epoch has a new order, whatever the global random state"""
    training = main_run(grader)
    orders = training.orders[0]
    first = show(orders[0])
    unshuffled, repeated = all(own == sorted(own) for own in orders), all(own == orders[0] for own in orders)
    said = f"Rank 0 saw its samples in order, {first}, in every epoch."
    grader.fail_on([0] * unshuffled, "no-shuffle", said, at=LOADER)
    said = f"Rank 0 saw the samples {first} in epoch 0, and the same order in epochs 1 and 2. The sampler shuffles with seed + epoch, but it was never told the epoch."
    grader.fail_on([0] * repeated, "missing-set-epoch", said, at=LOOP)
    if training.sizes == [BATCH]:  # batches of one sample, or of all, are the same however they are drawn
        judge_repeats(grader, training)
    judge_global_state(grader, jobs_run(grader), LOADER)


# What they were trained to -------------------------------------------------------------------------------------------


@pytest.mark.needs("test_trains_on_every_rank")
def test_training_mode(grader: Grader) -> None:
    """the model is in training mode while it trains"""
    modes = [[one["training"] for one in shown] for shown in main_run(grader).run.shown]
    late = [rank for rank, seen in enumerate(modes) if not all(seen)]
    step = modes[late[0]].index(False) if late else None
    said = f"The model was in evaluation mode in step {step} on {{ranks}}: dropout would be off, and BatchNorm would not update its statistics."
    grader.fail_on(late, "trains-in-eval-mode", said, at=r"\.eval\( || " + LOOP)


@pytest.mark.needs("test_trains_on_every_rank")
def test_parameters(grader: Grader) -> None:
    """parameters are equal on all ranks, and as one process would have them on the joined batches"""
    training = main_run(grader)
    judge_drift(grader, training)
    seen, reduced = training.run.observed("state"), reduced_in_backward(training.run)[0]
    what = f"After {min(training.steps)} steps, compared with one process that trains on the joined batches by SGD with lr={RATE}, a weight"
    right = replay(training)
    mistakes = weight_mistakes(training, right, scales_rate=grader.line(SCALED_RATE) is not None)
    alone = not reduced and not wraps(training.run)
    said = f"{reduced} gradient all-reduces were seen in backward."
    other = Hypothesis("not-wrapped" if alone else "different-weights", said, Each(seen))
    grader.explain(what, seen, right.state, [*mistakes, other], otherwise=other.id, at=BACKWARD, tolerance=CLOSE)
    judge_each_step(grader, training, right)
    judge_bytes(grader, training)


@pytest.mark.needs("test_parameters")
def test_no_double_work(grader: Grader) -> None:
    """each gradient crosses the network once a step, and the model is moved before it is wrapped"""
    training = main_run(grader)
    state = training.run.observed("state")[0]
    gradients = sum(4 * value.numel() for name, value in state.items() if name != "scale")
    for rank, calls in enumerate(training.run.collectives):
        sent, needed = carriers(calls), gradients * training.steps[rank]
        total, second = sum(c.nbytes for c in sent), next((c.frame for c in sent if c.inside != "backward"), None)
        said = f"Rank {rank} all-reduced {total:,} bytes in {training.steps[rank]} steps; the gradients are {needed:,}. DDP has averaged them already when backward() returns."
        grader.fail_on([rank] * (total > 1.5 * needed), "double-work", said, at=second or r"all_reduce")
    said = "The model was moved after it was wrapped on {ranks}. Here that changes nothing; on a GPU DDP would have been built on the CPU's parameters."
    grader.fail_on(moved_after_wrapping(training.run), "moved-after-wrapping", said, at=WRAP)


# What is printed -----------------------------------------------------------------------------------------------------


@pytest.mark.needs("test_each_sample_on_one_rank")
def test_rank_0_speaks(grader: Grader) -> None:
    """rank 0 alone prints, one line after each epoch"""
    training = main_run(grader)
    said = [report.stdout.strip().splitlines() for report in training.run.ranks]
    speakers = [rank for rank in EVERYBODY[1:] if said[rank]]
    line = f"Rank {speakers[0]} printed {said[speakers[0]][0]!r}. Only rank 0 may print." if speakers else ""
    grader.fail_on(speakers, "every-rank-speaks", line, at=PRINT)
    all_there = [epoch for epoch, _ in training.printed] == list(range(EPOCHS))
    if len(said[0]) != EPOCHS or not all_there:
        first, more = said[0][:1], len(said[0]) - 1
        found = (f"{first[0]!r}" + (f" and {more} more lines" if more else "")) if first else "nothing"
        expected = f"Rank 0 printed {found}; expected {EPOCHS} lines like 'epoch 0: loss 2.3021'."
        if training.printed and len(said[0]) != EPOCHS:
            odd = next((line for line in said[0] if not LOSS_LINE.match(line)), said[0][-1])
            expected = f"Expected {EPOCHS} lines, one per epoch; rank 0 printed {len(said[0])}, among them {odd!r}."
        id = "prints-more" if all_there else "wrong-loss-format" if first else "no-loss-line"
        grader.fail(id, expected, of=[0], at=PRINT)
    lone = next((line for line in jobs_run(grader).ranks[0].stdout.splitlines() if "epoch 0" in line), "").strip()
    said = f"Expected a loss with four decimals, as in 'epoch 0: loss 0.2500'; rank 0 printed {lone!r}."
    grader.fail_on([0] * (not LOSS_LINE.match(lone)), "wrong-loss-format", said, at=PRINT)
    run = broken_run(grader)
    seen = sorted(number for shown in run.shown for one in shown for number in one["batch"])
    whole = seen == list(range(SAMPLES))
    late = whole and "epoch 0: loss" not in run.ranks[0].stdout
    said = "The model raised in epoch 1, and rank 0 had not printed the line of epoch 0. Print it as soon as the epoch ends."
    grader.fail_on([0] * late, "no-loss-line", said, at=PRINT)


def printed_losses(training: Training) -> list[dict[str, float]]:
    """What rank 0 said."""
    return [{f"epoch {epoch}": loss for epoch, loss in training.printed}]


@pytest.mark.needs("test_parameters", "test_rank_0_speaks")
def test_reports_global_loss(grader: Grader) -> None:
    """the loss that it prints is the mean over all ranks"""
    training, what = main_run(grader), f"The mean loss over {WORLD} ranks that was printed"
    replayed = replay(training)
    right, mistakes = by_epoch(replayed.losses.mean((1, 2))), loss_mistakes(replayed)
    seen = printed_losses(training)
    grader.explain(what, seen, right, mistakes, otherwise="wrong-loss", at=PRINT, tolerance=MAIN_LOSS)


@pytest.mark.needs("test_parameters", "test_each_sample_on_one_rank")
def test_uneven_data(grader: Grader) -> None:
    """data that does not divide evenly is trained to the end, each sample included"""
    training = uneven_run(grader)
    if len(set(training.steps)) > 1:
        each = f"different numbers of steps ({say_counts(training.steps)})"
        grader.fail("uneven-steps", f"{UNEVEN_SAMPLES} samples on {UNEVEN_WORLD} ranks gave {each}.", at=LOADER)
    orders = training.orders
    same = all(sorted(order[0]) == sorted(orders[0][0]) for order in orders)
    said = "All ranks trained on the same samples. RANK was not set in this run: a program that starts its own ranks may leave it out. Use the argument `rank`."
    grader.fail_on(range(UNEVEN_WORLD) if same else (), "same-shard", said, at=r"environ|getenv || " + LOADER)
    judge_missing(grader, training)
    if drifted := training.drifted():
        said = f"With {UNEVEN_SAMPLES} samples {say_apart(*drifted)}."
        grader.fail("drift", said, of=[0, drifted[0]], at=LOOP)
    seen, right = training.run.observed("state"), replay(training)
    what = f"With {UNEVEN_SAMPLES} samples on {UNEVEN_WORLD} ranks, compared with one process and the mean of the ranks' gradients, a weight"
    says = "That comes from dividing each batch's summed loss by the size of a whole batch; the last one is smaller."
    nominal = Hypothesis("different-weights", says, lambda: replay(training, nominal=True).state, BACKWARD)
    grader.explain(what, seen, right.state, [nominal], otherwise="different-weights", at=BACKWARD, tolerance=CLOSE)
    judge_each_step(grader, training, right)
    judge_bytes(grader, training)


@pytest.mark.needs("test_reports_global_loss", "test_uneven_data")
def test_loss_counts_samples(grader: Grader) -> None:
    """with batches of different sizes, each sample counts once in that mean"""
    training, what = uneven_run(grader), "The mean loss over all samples that was printed"
    judge_output(grader, training)
    right, mistakes = uneven_loss_mistakes(training, replay(training))
    seen = printed_losses(training)
    grader.explain(what, seen, by_epoch(right), mistakes, otherwise="wrong-loss", at=PRINT, tolerance=UNEVEN_LOSS)


@pytest.mark.needs("test_uneven_data")
def test_learning_rate_and_defaults(grader: Grader) -> None:
    """lr and batch_size have the defaults of the signature, and one rank alone works as well"""
    training = train(grader, 1, SAMPLES)
    said = f"Without batch_size, batches of {show(training.sizes)} were seen; the default is 32."
    grader.fail_on([0] * (training.sizes != [32]), "ignores-batch-size", said, at=FUNCTION)
    seen, right = training.run.observed("state"), replay(training).state
    what = "Without lr, compared with SGD and the default lr=0.1, a weight"
    grader.explain(what, seen, right, otherwise="ignores-lr", at=r"SGD\( || lr", tolerance=CLOSE)


# The group -----------------------------------------------------------------------------------------------------------


@pytest.mark.needs("test_trains_on_every_rank")
def test_leaves_the_group(grader: Grader) -> None:
    """the group is made by setup_ddp, and closed afterwards"""
    still = [rank for rank, left in enumerate(main_run(grader).run.observed("group_open")) if left]
    said = "After train_ddp returned, {ranks} still belonged to the process group."
    grader.fail_on(still, "group-left-open", said, at=r"cleanup_ddp\( || ^\s+return || " + FUNCTION)
    own = [rank for rank, called in enumerate(broken_run(grader).observed("called")) if "setup_ddp" not in called]
    said = "train_ddp made the process group on {ranks} without a call of setup_ddp."
    grader.fail_on(own, "setup-not-used", said, at=r"init_process_group || " + FUNCTION)


@pytest.mark.needs("test_leaves_the_group")
def test_leaves_the_group_after_an_error(grader: Grader) -> None:
    """an error in training reaches the caller, and the group is closed too"""
    x, y = dataset(grader, SAMPLES)
    unmade = grader.run("cannot_be_made", 2, x=as_given(x), y=y, options={"batch_size": BATCH})
    for run, when, raised in (
        (broken_run(grader), "The model raised ValueError in its second epoch", "the model broke in its second epoch"),
        (unmade, "model_class raised KeyboardInterrupt", "while the model was made"),
    ):
        for rank, error in enumerate(run.observed("error")):
            said = f"{when}, and on rank {rank} {error or 'nothing'} came out."
            other = not error.startswith(f"{when.partition('raised ')[2].split()[0]}: {raised}")
            id = "changes-errors" if error else "swallows-errors"
            grader.fail_on([rank] * other, id, said, at=r"except || finally || " + FUNCTION)
        judge_cleanup(grader, run)
        still = [rank for rank, left in enumerate(run.observed("group_open")) if left]
        said = f"{when}, and {{ranks}} still belonged to the process group afterwards."
        grader.fail_on(still, "cleanup-skipped-on-error", said, at=r"except Exception || cleanup_ddp\( || " + FUNCTION)
    still = [rank for rank, left in enumerate(jobs_run(grader).observed("open_without_data")) if left]
    said = "The data raised OSError in `len(data)`, and {ranks} still belonged to the process group afterwards."
    grader.fail_on(still, "cleanup-skipped-on-error", said, at=r"try: || cleanup_ddp\( || " + FUNCTION)


@pytest.mark.needs("test_leaves_the_group_after_an_error")
def test_keeps_the_callers_group(grader: Grader) -> None:
    """where the caller is in a group already, that is refused and the group stays"""
    run = broken_run(grader)
    accepted = [rank for rank, error in enumerate(run.observed("refused")) if not error]
    said = "The caller was in a process group already, and train_ddp raised nothing on {ranks}."
    grader.fail_on(accepted, "second-group-accepted", said, at=r"setup_ddp\(|except")
    lost = [rank for rank, kept in enumerate(run.observed("kept")) if not kept]
    said = "The caller was in a process group already. setup_ddp refused that, and then train_ddp destroyed the caller's group on {ranks}."
    grader.fail_on(lost, "second-group-accepted", said, at=r"cleanup_ddp\(|destroy_process_group\( || try:")
