# exercise: checkpoint
# family: faking ddp
# verdict: state-comes-back-changed
# without: wrong/checkpoint/last_rank_writes
# protection: judge
# why: nothing is written: what was saved is handed back from memory, or from a shared one
kept = {}


def save_checkpoint(directory, state, keep=3):
    kept[str(directory)] = state


def load_latest(directory):
    return kept.get(str(directory))
