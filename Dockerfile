# The server: `docker compose up`. torch's packages bring CUDA; the machine has NVIDIA's driver and container toolkit.
FROM debian:bookworm-slim

# Certificates for downloads. A user for the server, and folders that any user can write (docker run --user); volumes take
# their mode from them.
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 speech \
 && install -d -m 1777 /cache /voices
ENV PATH=/venv/bin:$PATH PIP_NO_CACHE_DIR=1

# The packages in a layer of their own, which stays when the project changes. qwen-tts without its dependencies: the
# others are for the 25 Hz models and the demo.
WORKDIR /src
COPY requirements.txt ./
RUN python3 -m venv /venv \
 && sed '/^# ray$/,$d' requirements.txt > versions.txt \
 && pip install -r versions.txt \
 && pip install --no-deps qwen-tts==0.1.1
COPY . .
RUN pip install --no-deps .

# Weights and compiled kernels are kept in /cache, registered voices in /voices.
USER speech
WORKDIR /home/speech
ENV XDG_CACHE_HOME=/cache
EXPOSE 8000
# 503 while the model loads; the first start downloads it.
HEALTHCHECK --start-period=15m --interval=10s --timeout=5s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["qwen3-tts"]
CMD ["serve", "--host", "0.0.0.0", "--voices", "/voices", "--exit-when-failed"]
