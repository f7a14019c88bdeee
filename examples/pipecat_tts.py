"""pipecat: its OpenAI service, pointed at this server.

    qwen3-tts serve --model 0.6B-CustomVoice --port 8000
    pip install pipecat-ai
    python examples/pipecat_tts.py http://127.0.0.1:8000/v1

pipecat knows only OpenAI's voice names; the server gives each of them a voice that it has. Prints how much audio came;
in a real pipeline a transport takes the place of Listener. Run with pipecat-ai 1.14.0.
"""

import asyncio
import os
import sys

from pipecat.frames.frames import EndFrame, TTSAudioRawFrame, TTSSpeakFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.workers.runner import WorkerRunner


class Listener(FrameProcessor):
    seconds = 0.0

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self.seconds += len(frame.audio) / 2 / frame.sample_rate
        await self.push_frame(frame, direction)


async def main(url: str) -> None:
    key = os.environ.get("QWEN3_TTS_API_KEY", "none")
    service = OpenAITTSService(base_url=url, api_key=key, settings=OpenAITTSService.Settings(voice="nova"))
    listener = Listener()
    worker = PipelineWorker(Pipeline([service, listener]))
    await worker.queue_frames([TTSSpeakFrame("Hello from pipecat."), EndFrame()])
    runner = WorkerRunner()
    await runner.add_workers(worker)
    await runner.run()
    print(f"{listener.seconds:.2f} s of audio")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"))
