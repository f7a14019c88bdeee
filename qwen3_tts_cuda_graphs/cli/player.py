"""--play: play on the sound device. Imports nothing that takes time."""

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator

from qwen3_tts_cuda_graphs.common.command import install_command

TIMEOUT = 10.0  # seconds that the device may take longer than the audio lasts


def sound_device():
    """The package sounddevice. Raises an error if nothing can be played."""
    try:
        import sounddevice
    except ImportError:
        raise ValueError(f"--play needs the package sounddevice: run {install_command('sounddevice')}") from None
    except OSError:  # the package is installed, but not the library
        raise ValueError("--play needs the library PortAudio: on Debian, apt-get install libportaudio2") from None
    try:
        sounddevice.query_devices(kind="output")
    except (ValueError, sounddevice.PortAudioError):
        raise ValueError("--play finds no sound device here: leave it out, and give --output a file") from None
    return sounddevice


class Player:
    """Plays chunks in a thread of its own, so that it does not slow down their generation."""

    def __init__(self):
        self.package = sound_device()
        self.queue = queue.Queue()
        self.device = None
        self.thread = threading.Thread(target=self.play, name="player", daemon=True)
        self.seconds = 0.0
        self.error = None

    def __enter__(self) -> "Player":
        return self

    def follow(self, chunks: Iterable) -> Iterator:
        """Yield the chunks (samples, rate), and play them."""
        for audio, rate in chunks:
            if self.device is None:
                self.open(rate)
            self.check()
            self.queue.put(audio.astype("float32"))
            self.seconds += len(audio) / rate
            yield audio, rate

    def open(self, rate: int) -> None:
        try:
            self.device = self.package.OutputStream(samplerate=rate, channels=1, dtype="float32")
            self.device.start()
        except self.package.PortAudioError as error:
            raise ValueError(f"--play cannot use the sound device: {error}: leave it out") from None
        self.thread.start()

    def play(self) -> None:
        try:
            while (audio := self.queue.get()) is not None:
                self.device.write(audio)
            self.device.stop()  # returns when everything was played
        except self.package.PortAudioError as error:
            self.error = error

    def check(self) -> None:
        if self.error:
            raise ValueError(f"the sound device has stopped: {self.error}: leave out --play")

    def __exit__(self, failure, *_) -> None:
        """Wait until everything was played; after an error or Ctrl-C, stop at once."""
        if self.device is None:
            return
        try:
            self.queue.put(None)
            if failure is None:
                self.thread.join(self.seconds + TIMEOUT)
                self.check()
        finally:
            with contextlib.suppress(self.package.PortAudioError):
                self.device.abort()
            self.thread.join(TIMEOUT)
            self.device.close()
