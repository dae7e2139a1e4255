"""State machines: a message goes in, actions come out; no I/O, threads, clock or randomness.

- `Shard` (shard.py): the jobs of one shard, and their tables. Every message enters here.
- `Job` (job.py), `Lifetimes` (lifetime.py): when a job continues, starts over, or is forgotten.
- `Membership` (membership.py): the workers of a job; time is an argument.
- `Table` (table.py): tensors under one mode. `Participants` are the workers that steps wait for.
- `SliceClock` (slice_clock.py): the changes that a push makes, and when a pull is answered; one for
  each slice. Its parts: `Progress`, `OpenStep`, `Parking`, `Newcomers`.
- `Barriers`, `Stalls`, `Limits`: rounds that all workers must reach, waits to report, bounds.

The driver of a `Shard` (the engine, the simulator) has these duties:

1. Serialise: call one method of a shard at a time, and read its state in the same way.
2. Keep the payload and the reply of each push and pull under the token that was passed in, until an
   action names the token: `Hold`, `Add` and `Load` the payload, `Acknowledge` and `Answer` the
   reply. `SliceClock.forget` gives a pull's token back. A repeated push replaces a parked one,
   whose token no action will name then.
3. Execute the actions (orders.py) of one slice one after the other, in the order in which they were
   returned. Those of different slices may be executed at once.
4. With a journal, write each change of a slice before executing an `Acknowledge` or `Answer` that
   follows it: every answer that a worker has received outlives the process.
5. Free the sender's memory only at its `Acknowledge`. `Hold` says that the payload must be copied
   out of borrowed memory before that.
6. Execute the actions that `decide_join`, `decide_leave`, `tick`, `step_aside` and `change` return
   as well: a change of the membership closes steps and answers pulls.
7. Call `tick` about once a second with the time: leases run out only there.
8. After a restart, restore the workers and tables from records, and resume each clock from its
   journal (`SliceClock.resume`), before the first message.
"""
