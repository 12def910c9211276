# %% [markdown]
# A memory without `async`, for scripts and notebooks. Run it cell by cell, or as `python examples/sync_notebook.py`.

# %%
from contextlib import ExitStack

from locret_stream import SyncContext

session = ExitStack()  # stays open from cell to cell; a script says `with SyncContext("bundled") as ctx:`
ctx = session.enter_context(SyncContext("bundled", budget=768, chunk_size=256))

# %% Text goes in: a string, a list of token ids, or an iterator of them, such as an open file.
notes = [
    "Meeting of the harbour board, minutes.\n",
    "The door code of falcon is 48213.\n",
    "It rained all morning and nobody had brought an umbrella.\n",
    "Remember: the locker number for the heron is 7304.\n",
]
report = ctx.feed(notes)
print(f"{report.tokens} tokens read")

# %% A question is answered on a copy, so that the memory does not change.
before = ctx.memory.tokens
print(ctx.ask("What is the door code of falcon?", max_new_tokens=16))
assert ctx.memory.tokens == before

# %% A reply that is added to the memory, token by token.
for token in ctx.generate("What is the locker number for the heron?", max_new_tokens=16):
    print(token.text, end="")
print(f"\nthe memory went from {before} to {ctx.memory.tokens} tokens and keeps {ctx.memory.units} units")

# %%
session.close()
