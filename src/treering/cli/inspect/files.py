"""Opens the files that `treering inspect` reads one after the other, with the progress of reading on stderr."""

from collections.abc import Iterator
from functools import partial

from treering.cli.data_files import expanded, read_file, show_build
from treering.cli.display.progress import WorkProgress
from treering.cli.inspect.options import InspectOptions
from treering.data.cache.build import ReadOptions
from treering.data.cache.dataset import TokenDataset


def open_files(options: InspectOptions, progress: WorkProgress) -> Iterator[TokenDataset]:
    """The files in order; says once how messages become text, and what is to know of each file.

    Raises:
        InputError: a bad file, or messages without a tokenizer.
    """
    renderer, said = options.renderer(), False
    for path in expanded(options.files):
        dataset = read_file(
            path,
            renderer,
            ReadOptions(format=options.format),
            keeps_cache=not options.no_cache,
            on_progress=partial(show_build, progress, path.name),
        )
        if dataset.facts.form and not said:
            progress.console.print(dataset.facts.form, soft_wrap=True, markup=False)
            said = True
        for note in dataset.facts.notes:
            progress.console.print(f"{path.name}: {note}", soft_wrap=True)
        yield dataset
