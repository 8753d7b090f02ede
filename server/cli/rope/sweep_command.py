"""`windlass rope sweep`: options in, one of two calls out. Imports neither torch nor matplotlib until it needs them."""

from __future__ import annotations

from typing import Annotated

from typer_injector import Depends

from windlass.engine.errors import LoadError
from windlass.server.cli.rope.sweep_options import PerplexityOptions, RetrievalOptions, SharedSweepOptions
from windlass.server.options.spelling import ModelArgument
from windlass.server.startup.choice import choose_model


def sweep(
    shared: Annotated[SharedSweepOptions, Depends(SharedSweepOptions)],
    perplexity: Annotated[PerplexityOptions, Depends(PerplexityOptions)],
    retrieval: Annotated[RetrievalOptions, Depends(RetrievalOptions)],
    model: ModelArgument = None,
) -> None:
    """Perplexity by position under every scaling, or answers about what stands far back, as a report with a recommendation."""
    from windlass.server.cli.rope.pictures import require_matplotlib

    require_matplotlib()
    if retrieval.tasks:
        perplexity.reject_if_given()
        common, given = shared.checked(), retrieval.checked()
        from windlass.server.cli.rope.tasks.run import TaskOptions, run_tasks
        from windlass.server.text.tokenizer import Tokenizer

        name, path = choose_model(model)
        run_tasks(
            TaskOptions(
                model=path, model_name=model or name, load_tokenizer=Tokenizer.from_directory, **common, **given
            )
        )
        return
    retrieval.reject_if_given()
    if not shared.text:
        raise LoadError("--text is missing: give a text to read, or --tasks, which make their own")
    common, given = shared.checked(), perplexity.checked()
    from windlass.server.cli.rope.sweep import SweepOptions, run_sweep
    from windlass.server.text.tokenizer import Tokenizer

    name, path = choose_model(model)
    run_sweep(
        SweepOptions(model=path, model_name=model or name, load_tokenizer=Tokenizer.from_directory, **common, **given)
    )
