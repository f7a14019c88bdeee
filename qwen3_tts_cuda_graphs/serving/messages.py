"""Messages between the server and a worker, over a Unix socket: a JSON header and raw bytes, each with its length.

    4 bytes: length of the header | 4 bytes: length of the payload | header | payload

    server -> worker                                        worker -> server
    wake      to a spare: the GPU may be used               imported  all imports are done
    load      the model, with voices from files             loaded    the weights are loaded
    begin     capture the graphs for this many rows         ready     device, rows, sample rate
    speak     a text in a voice; null: it will follow       audio     samples as int16
    text      more of that text; null: its end              end       the call is complete
    read      the client has read this many chunks          error     the call has failed: an ApiError
    voice     make a voice from a recording, and keep it    beat      heartbeat
    forget    delete voices                                 draining  it was sent SIGTERM
    count     count the tokens of a text                    stopped   why it ends
    split     cut texts into parts that fit into a row
    cancel    end a call early

All messages to the worker but `wake`, `load`, `begin` and `forget` have the `id` of a call, as have `audio`, `end` and
`error`. The helpers that encode and decode use the same format: encoders.py, recordings.py.
"""

import json
import struct
from collections.abc import Iterator

LENGTHS = struct.Struct("<II")
MAX_BYTES = 1 << 28  # of a header or a payload; the largest payload is a client's recording

Message = tuple[dict, bytes]


def pack(header: dict, payload: bytes = b"") -> bytes:
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(payload)) + head + payload


class Unpacker:
    """Splits received bytes into messages."""

    def __init__(self):
        self.data = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self.data += data
        start = 0
        while len(self.data) - start >= LENGTHS.size:
            header_size, payload_size = LENGTHS.unpack_from(self.data, start)
            if max(header_size, payload_size) > MAX_BYTES:
                raise ValueError(f"a message of {header_size} + {payload_size} bytes")
            middle = start + LENGTHS.size + header_size
            if len(self.data) < middle + payload_size:
                break
            header = json.loads(self.data[start + LENGTHS.size : middle])
            start = middle + payload_size
            yield header, bytes(self.data[middle:start])
        del self.data[:start]
