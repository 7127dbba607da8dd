"""Several workers at once: each does one task after another, and what comes out is taken as it comes."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from .worker import Worker

LIFE = 100  # Tasks that one worker process does: then it is replaced, with whatever has grown in it
Task = TypeVar("Task")
Result = TypeVar("Result")


class Pool:
    """`jobs` workers. The end of the `with` that it belongs in, also by Ctrl-C, ends them and whatever they run."""

    def __init__(self, jobs: int, make: Callable[[], Worker]) -> None:
        self.workers = [make() for _ in range(max(1, jobs))]
        self.threads: list[tuple[threading.Thread, Worker]] = []
        self.ending = False  # What a worker says from then on is no result: it is being killed

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.ending = True
        for thread, worker in self.threads:
            thread.join(0.1)
            while thread.is_alive():  # again and again: the worker may be only just starting
                worker.kill()
                thread.join(0.1)
        for worker in self.workers:
            worker.stop()

    def each(self, tasks: Sequence[Task], do: Callable[[Worker, Task], Result]) -> Iterator[tuple[Task, Result]]:
        """Every task with what `do` returned for it, as they end. Raises whatever a `do` raises."""
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Task, Result] | BaseException] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)

        def work(worker: Worker) -> None:
            served = 0
            try:
                while not self.ending:
                    task = waiting.get_nowait()
                    done.put((task, do(worker, task)))
                    served += 1
                    if served % LIFE == 0:
                        worker.stop()
            except queue.Empty:
                pass
            except BaseException as error:  # a full disk, a folder that is gone: raised by the main thread
                done.put(error)

        for worker in self.workers[: len(tasks)]:
            thread = threading.Thread(target=work, args=(worker,), daemon=True)
            self.threads.append((thread, worker))
            thread.start()
        for _ in tasks:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield result


@contextlib.contextmanager
def deadline(worker: Worker, seconds: float) -> Iterator[threading.Event]:
    """Within, the worker has so many seconds: after them it is killed, and the event is set."""
    late = threading.Event()

    def too_late() -> None:
        late.set()
        worker.kill()

    timer = threading.Timer(seconds, too_late)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
