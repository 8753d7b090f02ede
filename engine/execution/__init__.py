"""Model execution: input batch, forward batch, model runner, CUDA graphs and recorded steps, draft and MTP proposers."""
