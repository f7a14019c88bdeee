"""Messages between the server and a worker, over a Unix socket: a JSON header and raw bytes, each with its length.

    4 bytes: length of the header | 4 bytes: length of the payload | header | payload

    server -> worker                                        worker -> server
    wake      to a spare: the GPU may be used               imported  its imports are done
    load      the model, with voices from files             loaded    the weights are there
    begin     capture the graphs for so many rows           ready     device, rows, sample rate
    speak     a text in a voice; null: it still arrives     audio     samples as int16
    text      a piece of an arriving text; null: its end    end       of a call: nothing more follows
    read      the client has read so many chunks            error     of a call: an ApiError for the client
    voice     make a voice from a recording, and keep it    beat      it is alive
    forget    delete voices                                 draining  it was sent SIGTERM
    count     how many tokens a text has                    stopped   why it ends itself
    split     cut texts into parts that fit into a row
    cancel    nobody listens any more

Everything but `wake`, `load`, `begin` and `forget` has the `id` of its call, and so has what answers it.
"""

import json
import struct
from collections.abc import Iterator

LENGTHS = struct.Struct("<II")
MAX_BYTES = 1 << 28  # of a header or payload; the largest is a client's recording

Message = tuple[dict, bytes]


def pack(header: dict, payload: bytes = b"") -> bytes:
    head = json.dumps(header).encode()
    return LENGTHS.pack(len(head), len(payload)) + head + payload


class Unpacker:
    """Bytes as they come -> messages."""

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
