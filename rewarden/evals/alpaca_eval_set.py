"""Which of AlpacaEval's 805 instructions a text is, known by a checksum; the instructions themselves are not here."""

import base64
import hashlib

NUM_INSTRUCTIONS = 805
"""Instructions of the AlpacaEval set, numbered from 0 in the order of its files."""

_DIGEST_BYTES = 4

_DIGESTS = (
    "jCPYTRB5Pqfliyzka6koR3L3RzBI9YQ1CCXnFSaxZMHZeAPk0xof0xJMnN49B3iuTQSNS7QtIEm/w/ifMNfQKGwOMOp+UxzpZjeq4IYnP0pl70V0OfS/"
    "7FKeG9N8QMVgxJw3ZJ8wwtvUjHYWZjqW+SS6xazITpc1PJIGs+7Nhz+NR2hRRIfb85chnHLWHsFPReE0esX+wgaMAs9p0N6I2G79KEUcO9bqFqkFCBb1"
    "BCSjnQ58UaRuKXcRy+QKDAq6AeDz2vWsfr70YoIpi2q0tZTHv/qzK+bVGIniHUq/CJ8bBh8AC2J+xlAreEco7DuL7VozS9ePGvHioOavCCs6mgPmO6F9"
    "jYV4t9bcZM8cAL0vEyoAsaLy4/kXig6bK3C/uxIW+yHj7M7C5wxvoA9Ypj78JDHbCUfvfSbPKqLpJQ1ixpa1PcXAA2Mph+6/9drS/IqBb1qZm5S6QGSs"
    "gXhb9P7MoGQM3fnO/JBPqXeU8GEzroaVeQgBKmPZcjSqlQTWEGGPvf7Jt+05AMIRiYJ/F15Tdp5MetluIY/GT2oBPIF9i94Bw9jUCXNIVDhTgIoTb1YZ"
    "tOKfbF2ER+V4RRDuEJdOZ0Wm3H5MPcKN8C1QVa8yjdfSYr6bDd86wtm7TMTY7Abx2iCR29J9nY6sam/6yHK89tsPMgN23UvVjyekg7Sihq0NPIuY71IY"
    "MCFWnZ81cg/dqAaKV6AmfyaHsByI9DCFNhp/Soo+rWdiIV6N48pVnSQ66xl3sknps8MJMUn+KUBdAcLaz8tfbFGAMALgm9KfKupSNVqIdBD/FVuqtNEw"
    "yUPLFcPHR9MM2w3sTsPnQIzOZRhfWflYgGXqr8hw3qeHj30YExhyrsGIUnSqacAZlcDF+TUwTkSqpiy4QhpLecOV5uNA2NZ1W4BAtPmF51gDKFhUUFaE"
    "D6F7qTlRL/SVveZtXxbys4Pp7t8K6Bad+Q14YXiOz3U87Sy39qKzW+KTzwvsc39VM/WhIweN8oCyQMnnKPjvggPlpsxOMl+JzwSDKvvDHgeS8Ydy3kl1"
    "n4Pw9ADPAhrDukO+su8zVUJMiYjf65CB1Fro2YaMs5uvfCNvdKIJbiS7xzijI4EBl6nr7uoqPA9MBhfBgH0vMrkLPjBJAEl0+tUvzKcbYbqpePZ2MzxL"
    "1NvmdyvQJe7eUKyfqSyWHP4Ir+auP9N1QfjbLyj4N0xyvASlthd44XqCYge/ZfBElED+7gs8YYqvYDdfS76lLHV0afr/Rjp9Wr/3sl0VdMflcaCKtNex"
    "lP2msN+OLNS4XOjNfPW19/bhfGOvM1Sjx+TCgrHb5PrSFfR4LnndqnOcUO7k5LwbtdpQx4PLBerJFcGJkoPu5UX+t1b3yQr59ZoVYF2iNVbKCBgX1gfM"
    "MEM7gTm6tUPGWW6Cf9nklFe2aAf42u/6YXmZntEjFbelu2bSzE8dBmeil91pq5hjeHW3RxgEAqYKHEmiqVXARIsRN7eNzqAH9XSYofpo1QN0tvyJMzMt"
    "gduIn3I+tLPhcLKvt3t6nGc3+LbV9mR+W3UnRDhWiH0qrd1buf6bFBNcr+X5IVOxAucH1BLaBDnPO+O5tJMGDslGJ/lCohxNCxxnvTZWJaT/6Sc7swB9"
    "coP82gH9hHeWdcC5gYxYOyAYVVxDMN6fX/ckk0djKCH4G+XLwpH5uXdnakBRcCwwOqcqJM2Jluq35H8uLzEuMovMSC7Og8wTU2Bg3YRQW1rfBNue9LC9"
    "JtsLl3cOTAWAHo0GKNMq4ejmc0mjNinyQfYNM4K42npqRd/tuRJZ+Y58T+ujzDA6woHZUf24tB+KKtG9cca3bhTiPi3Axsw1JE9xXs1LiGYS115JkJIv"
    "+NdNWI/D44ltYjRb4+TESdNfMwfeEZXyzDA99XzaQml7prFy5BsiIQ5cwE0F6InWuPzraX91NQy5AQj9B4qXIdHyo0Hj7bOjgt8dsmZDm9wyCuJSFHBl"
    "U7bp6RHEw+NgSpqKfDehEfofuHOsaE5nHU/7I/KCn3+HgO8eiQcWdElxkpTSOPsca4WDVWsMJJTCS6ysTsU6OVgpJAN4umRvtNBSRsxaHZLrt8HDwwFx"
    "f3Bbx+ud5MvbxKT6sXk7iGCc6GY/tHiSIQwkywfJ2n+UlOjAIeIbs9ahBS7NZxDRdfKJ7oteOjeVHt0ZaiUNkY+QNcX8qzhCca45d++r+Hy4qIRplfs9"
    "++FfoaBXxYrh7kkbte9bw5o6BOvg+Tp0vpw1ccr47yJ2NcLzH5c/+PNZioOwe7RmojQ3D73leyaSTm6DjKwIy/G8FoC7OAl34ESMi+yrIBmcCUHIDk9H"
    "MfsFoYM2ow9SA2z9VLqLHzeDi7Ci0jtEeQqNVZOnfeulzLLctBrA1vEmSMEWRtR61ZB2sgl7w+ZLn9bHcZNKXwUOFh9VmQpO08B2dLyN3BAfC0emg9rF"
    "2qSJtC+aHMT7CUw+y4yQ9KL+4dSzxByanP4BfvvNEuIIzE3RpJ3pKrr7fHOQf3DWbQ4LawhWaO4AdDnu3sm7qhonWFlgKy19yp7kG3Wb9QXRahFICD5a"
    "wcAz7Up4/D5DqgUO8zYtfcSaEyXsdkxmk9PokVW3nzZZkme6k04pLdhDQ3BPO/N/oI/P28mE11kD1iFuC3Tss6ffk14ttuUT7cbvc79uynYtcLPTPlBb"
    "NEAtTMDXsYN8Bx2kzik+WYQxwHKrNSkdlnGz8lruiIU5z5QA1rlbe80+XzfOUwPoZ3VeE8lSdmU6bAPaLPYXbpeLhRjieeZFMAvc8kmSmvNN2Uxw4rE2"
    "EykUbahyZlGjknSmnStgmxwENhBJaBRYklwHA8lQHYA9UjgQ9KvCtffadKxrAgmUvCyuGDCTtzKNVfVUQjzpMYX4qwX+H3iSxhEtly43cFLpakh/XnIv"
    "1LZcDU/9m8RnvKjWWcTTvO4e9cyqjZcPyd8gzk6MbggVdcyUq5UKyF7piz3c91pyQ+Lpa86lJ+wvusGK6vJvYRIVWWDQs11VIwrx6QncdD8lE0dR3XoD"
    "mAq7JOXYz7fdcPM2IPCDUHR799QQwFXTuvo0nr+wiINH602lKqVw2HaFdduManlL3CExEy9wSidfeuhQJjBEuIzbR1um7RzDRbOD1iq9fJk/t6pmjtXQ"
    "XNIgcRiC2KZkVQ89kP6S1lEIexURt+SNIzuxk73gNb0XlAvBF/tihfZdlHZgBaUhsd8zE0WcLz965YSUWNaILapyc2zQFWf2IUOuGnTECtw9c6vcMXxc"
    "6aF9LfWoz+NtonUjFApWO09sYXgsbsCLz/RpsgRcg6rk9ADjHR+BVNkRcTbEAxeLo2uQSyMYwVQEFcdW4eouTQ9yfROGNsczRmZId8ptU9in5aOykcaL"
    "NiNij5BlBb8ecb0o3/FCZhlrRvZ0lCXa0gDt373llNjtuOlbukTgfXAI+N+jChZ0St7sHZSwLUSxC4ez5Pj4mLGPTMayeXkfCRhmurD2RGZv+eKefI6G"
    "foaa0O5uUn2eyeirJi0qmUhZ9HrVhx9ddBLk4D8GDLIXB9Xdd6ZY77WtzLUs99jfxaA2CQYGbR+gvgQKdI+R0FNQW9XSIygRwrCF8dNijdNuKBW7Nd8s"
    "QC1Nxczhwf8JMe6Mz9r5Q7gPR+6laTt6qNsthrn9dplu5L45TEZ6UzRwNfmBSpExwaQY6+KMYBOI/lPaY0wpNuqoBKDAy/Q0/dCt1/COzOyvmHDWDUxE"
    "/RUIANfRsDux8x+G1oU9oZrVREjzMFC6VEOS/D5oe1b/oJ5YibAt83hqn9JAwLtf6I+Ez0Xm1C/UR8VmGE2cgtBZxyx3eJy5V+qb/Y1k5LX5X4SMTbMs"
    "H1yRJkfRXZEA0o3NkCY0/9O2tg8vgVILv2D/duNlzW8dXVJViBqExEHF6/CHH5qvFVCYq518LPLnw7na17hJy+tlbQPlHPE2BzlSqFqRJ3nVKGZArRH8"
    "SvdlnJqADS2YOnryq8yldvkRVCLDGlexDnb68hFOl37NKJCE4oKgdwfIX+MTV2dgN7ZmvTh1ZxQn1JB5UZgBq3nynFoCxVkmZvsi7W69Pt3pL0GMC+Nu"
    "Lr0nDODWyzJlk1SGXWc2Os+TtlxyUgubjKu+mlEHpzNMXxxMkpkMjymncbAYSc6R5nifiuIQWK1lq+i/2MgIrBQwmjn1suSCFSvxH5y7sdolibRSQ3PU"
    "gmjf+y0h9dI5tOHGZO2JXLtQy7pNtaFSj65cu4I9Q16oLI3qu0cLnq75ji5Xq6NLZBp88wF3XujSjeOUpLHokqokB4MpHt374JHRJP6OngQ9Df2YPs7S"
    "EQ=="
)


def instruction_number(instruction: str) -> int | None:
    """The place of an instruction in the AlpacaEval set, or None for one that is not in it.

    White space at both ends is ignored. Another text passes for one of the set with probability 2e-7.
    """
    return _NUMBERS.get(_digest(instruction))


def _digest(instruction: str) -> bytes:
    return hashlib.blake2b(instruction.strip().encode("utf-8"), digest_size=_DIGEST_BYTES).digest()


def _numbers() -> dict[bytes, int]:
    """blake2b of every instruction, 4 bytes each, in order."""
    joined = base64.b64decode(_DIGESTS)
    return {joined[i * _DIGEST_BYTES : (i + 1) * _DIGEST_BYTES]: i for i in range(NUM_INSTRUCTIONS)}


_NUMBERS = _numbers()
