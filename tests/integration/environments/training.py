"""A trainer's side of a run in tests: it takes one batch after the other, commits each, and finishes the run."""


async def batches_of(client, run, steps):
    """Yield the batches 1 to `steps`; each is committed after the caller has looked at it, the run finished at the end.

    It ends in a caller that goes through all of them; one that breaks off leaves the run open.
    """
    for number in range(1, steps + 1):
        batch = None
        while batch is None:
            batch = await client.get_batch(number, run_id=run.run_id, epoch=run.epoch, wait_seconds=5)
        yield batch
        await client.commit(number, run_id=run.run_id, epoch=run.epoch)
    await client.finish_run(run.run_id, epoch=run.epoch)
