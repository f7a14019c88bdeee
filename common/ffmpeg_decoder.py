"""python ffmpeg_decoder.py DEMUXER SECONDS < recording > samples: a process of its own, so that no file can take more
memory or time than is allowed here, whatever its header says.

Writes rate and channels as two 32-bit integers, then mono float32 samples, of at most so many seconds and one more.
"""

import io
import resource
import struct
import sys

CODECS = {"aac", "alac", "flac", "mp3", "opus", "pcm_s16le", "vorbis"}  # others are not for recordings
MAX_BYTES = 1 << 29  # of address space, a third of it the libraries
MAX_CPU_SECONDS = 20
MAX_RATE = 192_000


def main() -> None:
    demuxer, seconds = sys.argv[1], float(sys.argv[2])
    import av  # before the limits: it maps large files

    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    av.logging.set_level(None)
    file = sys.stdin.buffer
    file = file if file.seekable() else io.BytesIO(file.read())
    resampler, left = None, 1  # samples, until the rate is known
    with av.open(file, format=demuxer) as container:
        stream = container.streams.audio[0]
        codec = stream.codec_context.codec.canonical_name
        if codec not in CODECS:
            raise ValueError(f"{codec} is not read here")
        stream.thread_count = 1
        for frame in container.decode(stream):
            if resampler is None:
                if frame.sample_rate > MAX_RATE:
                    raise ValueError(f"{frame.sample_rate} Hz")
                left = int(seconds * frame.sample_rate) + 1
                resampler = av.AudioResampler("flt", "mono", frame.sample_rate)
                sys.stdout.buffer.write(struct.pack("<II", frame.sample_rate, frame.layout.nb_channels))
            for mono in resampler.resample(frame):
                samples = min(mono.samples, left)
                sys.stdout.buffer.write(bytes(mono.planes[0])[: 4 * samples])
                left -= samples
            if not left:
                break


if __name__ == "__main__":
    main()
