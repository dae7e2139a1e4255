"""Every error that Paceline raises on purpose.

    PacelineError
    |-- ConfigError                 a setting or argument is wrong; nothing was started
    |   `-- UnsupportedOptimizerError   the wrapped torch optimizer has no counterpart on the shards
    |-- GradientError               a gradient is not usable: NaN, Inf, or changed after its push
    |-- RemoteProtocolError         the peer sent something that this side refuses
    |   |-- DecodeError             bytes that are not what their header declares
    |   |   `-- DamagedError        a frame that was changed on its way; a retry may help
    |   |-- ProtocolVersionError    the peer speaks another version of the protocol
    |   |-- ShardMapError           shards in the wrong order, number or of several clusters
    |   |-- JobMismatchError        another model, mode, compressor or optimizer than the job's
    |   |-- AccessError             no token, a wrong one, or one of another job
    |   |-- TLSError                a certificate is not good, or only one side speaks TLS
    |   |-- RankTakenError          another live process holds this rank
    |   |   `-- NotOverError        the rank is not free yet: waiting helps
    |   |-- LimitError              a limit of the shard would be passed
    |   |   `-- TableFullError      a table has all the rows that it was declared for
    |   |-- UnknownJobError         the shard does not know this job or table
    |   |-- ReplacedError           the shards continue without this incarnation of the worker
    |   `-- StateLostError          a shard has lost the job's weights
    |-- ThreadError                 a thread of this process has failed, which only a bug can cause
    |-- GroupError                  another process of this worker's group has ended
    `-- TransportError              the network or the peer's process failed; a retry may help
        `-- ServerUnavailableError  no process answers at this address

The table from these classes to gRPC status codes is in `rpc.py`; this module imports nothing.
"""


class PacelineError(Exception):
    """Base class of all of Paceline's errors."""


class ConfigError(PacelineError, ValueError):
    """A setting or an argument is wrong."""


class UnsupportedOptimizerError(ConfigError):
    """The torch optimizer, or one of its arguments, has no counterpart on the shards."""


class GradientError(PacelineError):
    """A gradient holds NaN or Inf, or was changed after it had been pushed."""


class GroupError(PacelineError):
    """Another process of this worker's group has ended, or a collective of the group failed."""


class ThreadError(PacelineError):
    """A thread of this process ended by an unexpected error, so what it would have done fails."""


class RemoteProtocolError(PacelineError):
    """The peer sent something that this side refuses."""


class DecodeError(RemoteProtocolError):
    """The bytes are not exactly what their header declares."""


class DamagedError(DecodeError):
    """The checksum of a frame differs: bytes were changed on their way."""


class ProtocolVersionError(RemoteProtocolError):
    """The peer speaks another version of the protocol."""


class ShardMapError(RemoteProtocolError):
    """The shards' addresses are in the wrong order, of the wrong number, or of several clusters."""


class JobMismatchError(RemoteProtocolError):
    """The job on the shards has another model, mode, compressor or optimizer."""


class AccessError(RemoteProtocolError):
    """The peer was refused: it has no token, a wrong one, or one of another job."""


class TLSError(RemoteProtocolError):
    """TLS fails: a certificate is not valid, or only one side speaks TLS."""


class RankTakenError(RemoteProtocolError):
    """Another live process holds this rank of the job."""


class NotOverError(RankTakenError):
    """The rank may be a dead worker's, or others still train in a run that this process finished.

    Waiting helps.
    """


class LimitError(RemoteProtocolError):
    """A limit of the shard would be passed."""


class TableFullError(LimitError):
    """A table of rows has as many as it was declared for; none of the push's rows was counted."""


class UnknownJobError(RemoteProtocolError):
    """The shard does not know this job, table or slice."""


class ReplacedError(RemoteProtocolError):
    """The shards continue without this incarnation of the worker; it may rejoin."""


class StateLostError(RemoteProtocolError):
    """A shard was started again and does not have the job's weights."""


class BrokenModuleError(PacelineError):
    """A module holds a part of a version of published weights; it needs a whole commit."""


class TransportError(PacelineError):
    """The network or the peer's process failed."""


class ServerUnavailableError(TransportError):
    """Nobody answers at this address."""


LOST = (ReplacedError, UnknownJobError)  # After these a worker rejoins.
# After these the shards and this worker agree, and the step under way is still to be made.
OWN = (GradientError, ConfigError, TableFullError)
